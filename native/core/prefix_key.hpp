// Prefix keys: 64-bit names of a block and of everything before it.
//
// A block's content (tokens, lookahead tokens, extra keys) is compressed to a 128-bit digest that
// does not depend on what comes before, so that digests of many blocks are made side by side; the
// key of a block is then one folded multiplication of the key before it and the digest.
//
// The compression is NH (Black, Halevi, Krawczyk, Krovetz, Rogaway: "UMAC: Fast and Secure Message
// Authentication", 1999) over 64-bit words with secret words: two contents of equal length share a
// digest with probability 2**-64, whoever chose them. The secrets come from the index's seed and
// never leave it. A key is compared only with the keys that follow one known block: docs/guarantees.md
// says how rarely 64 bits then err, and what is proven of it and what supposed.
#pragma once

#include <array>
#include <bit>
#include <cstdint>
#include <cstring>
#include <string_view>

#include "core/wide.hpp"

namespace kvindex {

using Key = uint64_t;

struct Digest {
  uint64_t low = 0;
  uint64_t high = 0;
};

class KeyMaker {
 public:
  static constexpr size_t kStripeWords = 8;  // one stripe is 16 tokens below 2**32
  static constexpr size_t kSecrets = kStripeWords + 8;
  using Secrets = std::array<uint64_t, kSecrets>;

  explicit KeyMaker(const Secrets& secrets) : secrets_(secrets) {}

  // The key of a block with this content after a parent.
  Key child(Key parent, Digest content) const {
    return fold(content.low ^ parent, content.high ^ secrets_[kChain]);
  }

  // A hash of any bytes.
  uint64_t fingerprint(std::string_view text) const { return child(0, bytes(secrets_[kWide], text)); }

  // The key before the first block of a namespace, named by these bytes.
  Key root(std::string_view name) const { return child(0, bytes(secrets_[kRoot], name)); }

  // The digest of a block's tokens. Tokens below 2**32 are taken two to a word; if one does not
  // fit, all are taken as whole words, under another secret.
  Digest tokens(const uint32_t* tokens, size_t count) const {
    if (count == 2 * kStripeWords) return stripe([&](size_t i) { return pair(tokens + 2 * i); });
    return pairs([&](size_t i) { return uint64_t{tokens[i]}; }, count);
  }
  Digest tokens(const uint64_t* tokens, size_t count) const {
    uint64_t all = 0;
    for (size_t i = 0; i < count; ++i) all |= tokens[i];
    if (all >> 32 == 0) return pairs([&](size_t i) { return tokens[i]; }, count);
    return words(secrets_[kWide], [&](size_t i) { return tokens[i]; }, count);
  }

  // The digest of a block with lookahead tokens after its own.
  Digest with_lookahead(Digest content, const uint64_t* tokens, size_t count) const {
    return join(content, words(secrets_[kLookahead], [&](size_t i) { return tokens[i]; }, count));
  }

  // The digest of a block with extra keys; none leave it as it is.
  Digest with_extra(Digest content, std::string_view extra) const {
    return extra.empty() ? content : join(content, bytes(secrets_[kExtra], extra));
  }

 private:
  enum Secret : size_t {
    kChain = kStripeWords, kRoot, kWide, kLookahead, kExtra, kJoin, kLow, kHigh
  };

  static Digest multiply(uint64_t a, uint64_t b) {
    const auto product = static_cast<uint128_t>(a) * b;
    return {static_cast<uint64_t>(product), static_cast<uint64_t>(product >> 64)};
  }

  // Folded multiplication; the operands stay in, so that a zero does not erase the other one.
  static uint64_t fold(uint64_t a, uint64_t b) {
    const Digest product = multiply(a, b);
    return a ^ b ^ product.low ^ product.high;
  }

  static uint64_t pair(const uint32_t* tokens) {
    if constexpr (std::endian::native == std::endian::little) {
      uint64_t word;
      std::memcpy(&word, tokens, sizeof word);
      return word;
    }
    return tokens[0] | uint64_t{tokens[1]} << 32;
  }

  // NH of one stripe.
  template <class Word>
  Digest stripe(Word&& word) const {
    uint128_t sum = 0;
    for (size_t i = 0; i < kStripeWords; i += 2) {
      const uint64_t a = word(i) + secrets_[i];
      const uint64_t b = word(i + 1) + secrets_[i + 1];
      sum += static_cast<uint128_t>(a) * b;
    }
    return {static_cast<uint64_t>(sum), static_cast<uint64_t>(sum >> 64)};
  }

  // Any number of words, padded with zeros to whole stripes, one after the other.
  template <class Word>
  Digest words(uint64_t domain, Word&& word, size_t count) const {
    Digest state{domain, count};
    size_t begin = 0;
    for (; begin + kStripeWords <= count; begin += kStripeWords) {
      state = join(state, stripe([&](size_t i) { return word(begin + i); }));
    }
    if (begin < count) {
      state = join(state, stripe([&](size_t i) {
                     return begin + i < count ? word(begin + i) : uint64_t{0};
                   }));
    }
    return state;
  }

  // Tokens below 2**32, two to a word; one stripe needs no state.
  template <class Token>
  Digest pairs(Token&& token, size_t count) const {
    const auto word = [&](size_t i) -> uint64_t {
      const size_t at = 2 * i;
      if (at >= count) return 0;
      return token(at) | (at + 1 < count ? token(at + 1) : 0) << 32;
    };
    if (count <= 2 * kStripeWords) return stripe(word);
    return words(0, word, (count + 1) / 2);
  }

  Digest bytes(uint64_t domain, std::string_view text) const {
    const auto word = [&](size_t i) {
      uint64_t value = 0;
      if (std::endian::native == std::endian::little && 8 * i + 8 <= text.size()) {
        std::memcpy(&value, text.data() + 8 * i, 8);
        return value;
      }
      for (size_t b = 0; b < 8 && 8 * i + b < text.size(); ++b) {
        value |= uint64_t{static_cast<uint8_t>(text[8 * i + b])} << (8 * b);
      }
      return value;
    };
    const Digest state = words(domain, word, (text.size() + 7) / 8);
    return {state.low, state.high ^ text.size()};
  }

  // Chain two digests.
  Digest join(Digest before, Digest after) const {
    return {fold(before.low ^ after.low, after.high ^ secrets_[kLow]),
            fold(before.high ^ after.high ^ secrets_[kJoin], after.low ^ secrets_[kHigh])};
  }

  Secrets secrets_;
};

}  // namespace kvindex

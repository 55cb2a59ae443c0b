// A prompt's tokens and their prefix keys, made only as far as they are looked at.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "core/prefix_key.hpp"
#include "core/tree.hpp"

namespace kvindex {

// Tokens in memory. `ready` of `length` tokens can be read; the rest is still to be converted.
struct TokenView {
  enum class Kind : uint8_t { u32, i32, u64 };  // u64: values modulo 2**64

  Kind kind = Kind::u32;
  const void* data = nullptr;
  size_t ready = 0;
  size_t length = 0;
};

// The keys of a prompt's blocks in one namespace. `extras[i]` are block i's extra keys.
class PromptKeys {
 public:
  PromptKeys(const KeyMaker& maker, const Root& root, const TokenView& tokens,
             const std::vector<std::string>& extras, std::vector<Key>& keys)
      : maker_(maker), tokens_(tokens), extras_(extras), keys_(keys),
        size_(root.name.block_size), lookahead_(root.name.lookahead), last_(root.key) {
    keys_.clear();
    ready_blocks_ = blocks(tokens.ready);
    blocks_ = blocks(tokens.length);
  }

  // Make the first `count` keys as far as there are so many; return how many of them there are.
  size_t ready(size_t count) {
    if (count > ready_blocks_) count = ready_blocks_;
    if (count > keys_.size()) make(count);
    return count;
  }
  Key operator[](size_t i) const { return keys_[i]; }

  // Whether a match of so many blocks could be longer if more tokens were ready.
  bool starved(size_t matched) const { return matched == ready_blocks_ && matched < blocks_; }

 private:
  size_t blocks(size_t tokens) const {
    return tokens < lookahead_ ? 0 : (tokens - lookahead_) / size_;
  }

  void make(size_t count) {
    switch (tokens_.kind) {
      case TokenView::Kind::u32: return make_from(static_cast<const uint32_t*>(tokens_.data), count);
      case TokenView::Kind::i32: return make_from(static_cast<const int32_t*>(tokens_.data), count);
      case TokenView::Kind::u64: return make_from(static_cast<const uint64_t*>(tokens_.data), count);
    }
  }

  template <class Token>
  void make_from(const Token* tokens, size_t count) {
    if (extras_.empty() && lookahead_ == 0) {  // the common case, kept tight
      for (size_t i = keys_.size(); i < count; ++i) {
        last_ = maker_.child(last_, digest(tokens + i * size_, size_));
        keys_.push_back(last_);
      }
      return;
    }
    for (size_t i = keys_.size(); i < count; ++i) {
      const Token* block = tokens + i * size_;
      Digest content = digest(block, size_);
      if (lookahead_ != 0) {
        const std::vector<uint64_t> after(block + size_, block + size_ + lookahead_);
        content = maker_.with_lookahead(content, after.data(), lookahead_);
      }
      if (i < extras_.size()) content = maker_.with_extra(content, extras_[i]);
      last_ = maker_.child(last_, content);
      keys_.push_back(last_);
    }
  }

  Digest digest(const uint32_t* tokens, size_t count) const { return maker_.tokens(tokens, count); }
  Digest digest(const uint64_t* tokens, size_t count) const { return maker_.tokens(tokens, count); }
  Digest digest(const int32_t* tokens, size_t count) const {
    int32_t all = 0;
    for (size_t i = 0; i < count; ++i) all |= tokens[i];
    if (all >= 0) return maker_.tokens(reinterpret_cast<const uint32_t*>(tokens), count);
    const std::vector<uint64_t> wide(tokens, tokens + count);  // negative ones modulo 2**64
    return maker_.tokens(wide.data(), count);
  }

  const KeyMaker& maker_;
  const TokenView tokens_;
  const std::vector<std::string>& extras_;
  std::vector<Key>& keys_;
  const size_t size_;
  const size_t lookahead_;
  size_t ready_blocks_ = 0;
  size_t blocks_ = 0;
  Key last_;
};

}  // namespace kvindex

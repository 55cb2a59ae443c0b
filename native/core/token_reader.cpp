#include "core/token_reader.hpp"

#include <algorithm>
#include <array>
#include <cstring>

namespace kvindex {
namespace {

// The usual tokens are ints from 0 to 2**32 - 1 in their smallest form: 1, 2, 3 or 5 bytes. Which
// of these cannot be predicted, and where a token begins is known only from the one before it. So
// the lengths are worked out for all bytes of a window at once, as if a token began at each, and
// from them the lengths of two tokens in a row: the chain from pair to pair is one addition.
constexpr size_t kWindow = 1024;
constexpr size_t kLongest = 5;
constexpr size_t kLane = 16;            // bytes that are worked on together
constexpr size_t kPadding = 2 * kLane;  // bytes behind a window that are looked at too
constexpr uint8_t kNoToken = 0xc1;      // begins nothing in msgpack

typedef uint8_t Bytes __attribute__((vector_size(kLane)));

inline void load(const uint8_t* at, Bytes& lane) { std::memcpy(&lane, at, sizeof lane); }
inline void store(uint8_t* at, const Bytes& lane) { std::memcpy(at, &lane, sizeof lane); }

class Window {
 public:
  // `kPadding` bytes must follow the `size` bytes.
  Window(const uint8_t* bytes, size_t size) : bytes_(bytes) {
    Bytes lead, after1, after2, after3, after5, first;
    for (size_t i = 0; i < size + kLane; i += kLane) {
      load(bytes + i, lead);
      store(&one_[i], choose(lead, Bytes{} + 1, Bytes{} + 2, Bytes{} + 3, Bytes{} + 5));
    }
    for (size_t i = 0; i < size; i += kLane) {
      load(bytes + i, lead);
      load(&one_[i], first);
      load(&one_[i + 1], after1);
      load(&one_[i + 2], after2);
      load(&one_[i + 3], after3);
      load(&one_[i + 5], after5);
      store(&two_[i], first + choose(lead, after1, after2, after3, after5));
    }
  }

  // The length of the token that begins here, or 0 if it is not a usual one.
  size_t one(size_t at) const { return one_[at]; }

  // The length of this token and the next; both must be usual.
  size_t two(size_t at) const { return two_[at]; }

  uint32_t token(size_t at, size_t length) const {
    static constexpr std::array<uint32_t, 8> kMasks{0, 0x7f, 0xff, 0xffff, 0, 0xffffffff, 0, 0};
    const uint64_t word = load_big_endian<uint64_t>(bytes_ + at) >> ((64 - 8 * length) & 63);
    return static_cast<uint32_t>(word) & kMasks[length];
  }

 private:
  // For each lead the byte of the lane that belongs to the length it stands for, else 0.
  static Bytes choose(const Bytes& lead, const Bytes& of1, const Bytes& of2, const Bytes& of3,
                     const Bytes& of5) {
    return (reinterpret_cast<Bytes>(lead < 0x80) & of1) |
           (reinterpret_cast<Bytes>(lead == msgpack::kUint8) & of2) |
           (reinterpret_cast<Bytes>(lead == msgpack::kUint16) & of3) |
           (reinterpret_cast<Bytes>(lead == msgpack::kUint32) & of5);
  }

  const uint8_t* bytes_;
  std::array<uint8_t, kWindow + kPadding> one_;
  std::array<uint8_t, kWindow + kPadding> two_;
};

// Read pairs of usual tokens as far as they go, `done` tokens.
inline Reader read_usual(Reader in, uint32_t count, uint32_t* out, uint32_t& done) {
  uint32_t* next = out;
  uint32_t* const end = out + count;
  while (end - next >= 2 && in.left() != 0) {
    const size_t longest = kLongest * static_cast<size_t>(end - next);
    const size_t size = std::min({kWindow, in.left(), longest});
    std::array<uint8_t, kWindow + 2 * kPadding> copy;
    const uint8_t* bytes = in.at();
    if (in.left() < size + kPadding) {
      std::memcpy(copy.data(), bytes, in.left());
      std::memset(copy.data() + in.left(), kNoToken, kPadding);
      bytes = copy.data();
    }
    const Window window(bytes, size);
    size_t at = 0;
    while (at < size && end - next >= 2) {
      const size_t first = window.one(at);
      const size_t second = window.one(at + first);
      if (second == 0) break;
      next[0] = window.token(at, first);
      next[1] = window.token(at + first, second);
      next += 2;
      at += window.two(at);
    }
    if (at > in.left()) return {};  // the last token is cut off
    in.move_to(in.at() + at);
    if (at < size) break;
  }
  done = static_cast<uint32_t>(next - out);
  return in;
}

// A token that was read without a branch; `kLongestInt` bytes must be readable.
constexpr size_t kLongestInt = 9;

struct Usual {
  explicit Usual(const uint8_t* at) {
    const uint32_t lead = *at;
    const uint32_t high = lead >> 7;
    length = 1 + (high << (lead & 3));  // 0xcc, 0xcd, 0xce: 1, 2, 4 bytes follow
    const uint64_t tail = load_big_endian<uint32_t>(at + 1);
    value = static_cast<uint32_t>(tail >> ((40 - 8 * length) & 63)) | (lead & (high - 1));
    is_odd = (high & ((lead ^ msgpack::kUint8) > 2)) != 0;
  }

  uint32_t value;
  uint32_t length;  // at most `kLongestInt`
  bool is_odd;
};

// Read pairs of usual tokens as far as they go, `done` pairs.
Reader read_usual_pairs(Reader in, uint32_t count, uint32_t* out, uint32_t& done, Int& expected) {
  const uint8_t* at = in.at();
  uint32_t i = 0;
  while (i < count && static_cast<size_t>(in.end() - at) > 2 * kLongestInt) {
    const Usual first(at + 1);
    const Usual second(at + 1 + first.length);
    const bool continues = i == 0 || first.value == expected.value;
    if (*at != (msgpack::kFixArray | 2) || first.is_odd || second.is_odd || !continues) break;
    out[i++] = first.value;
    expected.value = second.value;
    at += 1 + first.length + second.length;
  }
  done = i;
  in.move_to(at);
  return in;
}

}  // namespace

Reader read_tokens(Reader in, uint32_t count, std::vector<uint32_t>& narrow,
                   std::vector<uint64_t>& wide) {
  const Reader start = in;
  const size_t begin = narrow.size();
  narrow.resize(begin + count);
  uint32_t* const out = narrow.data() + begin;
  uint32_t done = 0;
  uint64_t all = 0;
  in = read_usual(in, count, out, done);
  for (; done < count && all >> 32 == 0; ++done) {
    Int token;
    if (!in.read_int(token)) return {};
    out[done] = static_cast<uint32_t>(token.value);
    all |= token.value;
  }
  if (all >> 32 == 0) return in;

  narrow.resize(begin);
  in = start;
  for (uint32_t i = 0; i < count; ++i) {
    Int token;
    if (!in.read_int(token)) return {};
    wide.push_back(token.value);
  }
  return in;
}

Reader read_bigrams(Reader in, uint32_t count, std::vector<uint32_t>& narrow,
                    std::vector<uint64_t>& wide, uint64_t& last) {
  const Reader start = in;
  const size_t begin = narrow.size();
  narrow.resize(begin + count);
  uint32_t* const out = narrow.data() + begin;
  uint32_t done = 0;
  uint64_t all = 0;
  Int first, expected;
  in = read_usual_pairs(in, count, out, done, expected);
  for (; done < count && all >> 32 == 0; ++done) {
    const Int second = expected;
    if (!read_pair(in, first, expected) || (done != 0 && first != second)) return {};
    out[done] = static_cast<uint32_t>(first.value);
    all |= first.value;
  }
  if (all >> 32 != 0) {
    narrow.resize(begin);
    in = start;
    for (uint32_t i = 0; i < count; ++i) {
      const Int second = expected;
      if (!read_pair(in, first, expected) || (i != 0 && first != second)) return {};
      wide.push_back(first.value);
    }
  }
  last = expected.value;
  return in;
}

}  // namespace kvindex

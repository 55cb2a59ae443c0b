// A bounds-checked reader of msgpack.
//
// Every `read_…` returns false, and then leaves the reader anywhere within its bytes, if the next
// value is cut off or is not of that type. A reader is two pointers: pass it by value and return
// it, so that it stays in registers. Format: github.com/msgpack/msgpack/blob/master/spec.md.
#pragma once

#include <bit>
#include <cstddef>
#include <cstdint>
#include <string_view>

#include "core/big_endian.hpp"
#include "core/utf8.hpp"

namespace kvindex {

// First bytes of values.
namespace msgpack {
inline constexpr uint8_t kFixMap = 0x80, kFixArray = 0x90, kFixText = 0xa0, kNil = 0xc0;
inline constexpr uint8_t kFalse = 0xc2, kTrue = 0xc3, kBin8 = 0xc4, kBin16 = 0xc5, kBin32 = 0xc6;
inline constexpr uint8_t kFloat32 = 0xca, kFloat64 = 0xcb;
inline constexpr uint8_t kUint8 = 0xcc, kUint16 = 0xcd, kUint32 = 0xce, kUint64 = 0xcf;
inline constexpr uint8_t kInt8 = 0xd0, kInt16 = 0xd1, kInt32 = 0xd2, kInt64 = 0xd3;
inline constexpr uint8_t kText8 = 0xd9, kText16 = 0xda, kText32 = 0xdb;
inline constexpr uint8_t kArray16 = 0xdc, kArray32 = 0xdd, kMap16 = 0xde, kMap32 = 0xdf;
inline constexpr uint8_t kNegativeFixInt = 0xe0;
}  // namespace msgpack

// An int from -2**63 to 2**64 - 1.
struct Int {
  uint64_t value = 0;  // modulo 2**64
  bool negative = false;

  bool operator==(const Int&) const = default;
};

class Reader {
 public:
  Reader() = default;
  Reader(const uint8_t* begin, const uint8_t* end) : at_(begin), end_(end) {}

  const uint8_t* at() const { return at_; }
  const uint8_t* end() const { return end_; }
  // Whether it came from a function that returned `{}` for what it could not read.
  bool failed() const { return at_ == nullptr; }
  size_t left() const { return static_cast<size_t>(end_ - at_); }
  void move_to(const uint8_t* at) { at_ = at; }

  // The next value's first byte; 0xc1, which starts no value, at the end.
  uint8_t peek() const { return at_ == end_ ? 0xc1 : *at_; }
  bool next_is_array() const {
    const uint8_t lead = peek();
    return (lead & 0xf0) == msgpack::kFixArray || lead == msgpack::kArray16 ||
           lead == msgpack::kArray32;
  }
  bool next_is_map() const {
    const uint8_t lead = peek();
    return (lead & 0xf0) == msgpack::kFixMap || lead == msgpack::kMap16 || lead == msgpack::kMap32;
  }
  bool next_is_int() const {
    const uint8_t lead = peek();
    return lead < 0x80 || lead >= msgpack::kNegativeFixInt ||
           (lead >= msgpack::kUint8 && lead <= msgpack::kInt64);
  }
  bool next_is_text() const {
    const uint8_t lead = peek();
    return (lead & 0xe0) == msgpack::kFixText ||
           (lead >= msgpack::kText8 && lead <= msgpack::kText32);
  }
  bool next_is_bin() const { return peek() >= msgpack::kBin8 && peek() <= msgpack::kBin32; }

  // Read nil, if it comes next.
  bool take_nil() {
    const bool is_nil = peek() == msgpack::kNil;
    at_ += is_nil;
    return is_nil;
  }

  bool read_int(Int& out) {
    if (left() == 0) return false;
    const uint8_t lead = *at_++;
    if (lead < 0x80 || lead >= msgpack::kNegativeFixInt) {
      return set(out, static_cast<int8_t>(lead));
    }
    switch (lead) {
      case msgpack::kUint8: return read_unsigned<uint8_t>(out);
      case msgpack::kUint16: return read_unsigned<uint16_t>(out);
      case msgpack::kUint32: return read_unsigned<uint32_t>(out);
      case msgpack::kUint64: return read_unsigned<uint64_t>(out);
      case msgpack::kInt8: return read_signed<uint8_t, int8_t>(out);
      case msgpack::kInt16: return read_signed<uint16_t, int16_t>(out);
      case msgpack::kInt32: return read_signed<uint32_t, int32_t>(out);
      case msgpack::kInt64: return read_signed<uint64_t, int64_t>(out);
      default: return false;
    }
  }

  bool read_float(double& out) {
    const uint8_t lead = peek();
    if (lead == msgpack::kFloat64 && left() >= 9) {
      out = std::bit_cast<double>(load_big_endian<uint64_t>(at_ + 1));
      at_ += 9;
      return true;
    }
    if (lead == msgpack::kFloat32 && left() >= 5) {
      out = static_cast<double>(std::bit_cast<float>(load_big_endian<uint32_t>(at_ + 1)));
      at_ += 5;
      return true;
    }
    return false;
  }

  // Read text without checking that it is UTF-8.
  bool read_raw_text(std::string_view& out) {
    const uint8_t lead = peek();
    if ((lead & 0xe0) == msgpack::kFixText) return read_bytes(1, lead & 0x1f, out);
    return read_sized(lead, msgpack::kText8, out);
  }
  bool read_text(std::string_view& out) { return read_raw_text(out) && is_utf8(out); }
  bool read_bin(std::string_view& out) { return read_sized(peek(), msgpack::kBin8, out); }

  // Read an array's header; it has no more elements than there are bytes left.
  bool read_array(uint32_t& count) {
    return read_count(msgpack::kFixArray, msgpack::kArray16, count) && count <= left();
  }
  // Read a map's header; its keys and values are no more than there are bytes left.
  bool read_map(uint32_t& count) {
    return read_count(msgpack::kFixMap, msgpack::kMap16, count) && count <= left() / 2;
  }

  // Read any value that consists of nil, bool, int, float, text, bin, array, and map with text
  // keys, and is not nested very deep.
  bool skip() {
    *this = skipped(*this, kMaxDepth);
    return !failed();
  }

 private:
  static constexpr int kMaxDepth = 32;

  static Reader skipped(Reader in, int depth);

  static bool set(Int& out, int64_t value) {
    out = {static_cast<uint64_t>(value), value < 0};
    return true;
  }

  template <typename Unsigned>
  bool read_unsigned(Int& out) {
    if (left() < sizeof(Unsigned)) return false;
    out = {load_big_endian<Unsigned>(at_), false};
    at_ += sizeof(Unsigned);
    return true;
  }
  template <typename Unsigned, typename Signed>
  bool read_signed(Int& out) {
    if (left() < sizeof(Unsigned)) return false;
    const Unsigned bits = load_big_endian<Unsigned>(at_);
    at_ += sizeof(Unsigned);
    return set(out, static_cast<Signed>(bits));
  }

  bool read_bytes(size_t header, size_t length, std::string_view& out) {
    if (left() < header || left() - header < length) return false;
    out = {reinterpret_cast<const char*>(at_) + header, length};
    at_ += header + length;
    return true;
  }

  // Bytes whose lead is `first`, `first` + 1 or `first` + 2, for lengths of 8, 16 and 32 bits.
  bool read_sized(uint8_t lead, uint8_t first, std::string_view& out) {
    if (lead == first && left() >= 2) return read_bytes(2, at_[1], out);
    if (lead == first + 1 && left() >= 3) {
      return read_bytes(3, load_big_endian<uint16_t>(at_ + 1), out);
    }
    if (lead == first + 2 && left() >= 5) {
      return read_bytes(5, load_big_endian<uint32_t>(at_ + 1), out);
    }
    return false;
  }

  bool read_count(uint8_t fix, uint8_t first, uint32_t& count) {
    const uint8_t lead = peek();
    if ((lead & 0xf0) == fix) {
      count = lead & 0x0f;
      at_ += 1;
      return true;
    }
    if (lead == first && left() >= 3) {
      count = load_big_endian<uint16_t>(at_ + 1);
      at_ += 3;
      return true;
    }
    if (lead == first + 1 && left() >= 5) {
      count = load_big_endian<uint32_t>(at_ + 1);
      at_ += 5;
      return true;
    }
    return false;
  }

  const uint8_t* at_ = nullptr;
  const uint8_t* end_ = nullptr;
};

}  // namespace kvindex

// Big-endian loads and stores at any address, on machines of either byte order.
#pragma once

#include <bit>
#include <cstdint>
#include <cstring>

namespace kvindex {

inline uint8_t from_big_endian(uint8_t value) { return value; }
inline uint16_t from_big_endian(uint16_t value) {
  return std::endian::native == std::endian::little ? __builtin_bswap16(value) : value;
}
inline uint32_t from_big_endian(uint32_t value) {
  return std::endian::native == std::endian::little ? __builtin_bswap32(value) : value;
}
inline uint64_t from_big_endian(uint64_t value) {
  return std::endian::native == std::endian::little ? __builtin_bswap64(value) : value;
}

template <typename Unsigned>
inline Unsigned load_big_endian(const uint8_t* at) {
  Unsigned value;
  std::memcpy(&value, at, sizeof value);
  return from_big_endian(value);
}

template <typename Unsigned>
inline void store_big_endian(uint8_t* at, Unsigned value) {
  value = from_big_endian(value);
  std::memcpy(at, &value, sizeof value);
}

}  // namespace kvindex

// The index as Python holds it, and buffers that Python gives to it.
#pragma once

#include <nanobind/nanobind.h>

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <optional>

#include "bindings/gil.hpp"
#include "core/index.hpp"

namespace kvindex {

inline constexpr size_t kSecretBytes = (KeyMaker::kSecrets + 3) * sizeof(uint64_t);

// A buffer of bytes, if an object has one to give.
class SimpleBuffer {
 public:
  explicit SimpleBuffer(nanobind::handle object) {
    open_ = PyObject_CheckBuffer(object.ptr()) &&
            PyObject_GetBuffer(object.ptr(), &buffer_, PyBUF_SIMPLE) == 0;
    if (!open_) PyErr_Clear();
  }
  ~SimpleBuffer() {
    if (open_) PyBuffer_Release(&buffer_);
  }
  SimpleBuffer(const SimpleBuffer&) = delete;
  SimpleBuffer& operator=(const SimpleBuffer&) = delete;

  bool open() const { return open_; }
  const uint8_t* data() const { return static_cast<const uint8_t*>(buffer_.buf); }
  size_t size() const { return static_cast<size_t>(buffer_.len); }

 private:
  Py_buffer buffer_{};
  bool open_ = false;
};

struct PyIndex {
  PyIndex(nanobind::bytes secrets, std::optional<uint64_t> max_blocks,
          std::optional<uint64_t> max_blocks_per_rank, size_t max_orphans)
      : index(key_secrets(secrets), scramble(secrets), max_blocks, max_blocks_per_rank,
              max_orphans, &GilUntilWaiting::waiting) {}

  static uint64_t word(nanobind::bytes secrets, size_t i) {
    if (secrets.size() != kSecretBytes) throw nanobind::value_error("secrets of a wrong size");
    uint64_t value;
    std::memcpy(&value, static_cast<const uint8_t*>(secrets.data()) + i * sizeof value,
                sizeof value);
    return value;
  }
  static KeyMaker::Secrets key_secrets(nanobind::bytes secrets) {
    KeyMaker::Secrets words;
    for (size_t i = 0; i < words.size(); ++i) words[i] = word(secrets, i);
    return words;
  }
  static Scramble scramble(nanobind::bytes secrets) {
    constexpr size_t n = KeyMaker::kSecrets;
    return Scramble(word(secrets, n), word(secrets, n + 1), word(secrets, n + 2));
  }

  Index index;
};

}  // namespace kvindex

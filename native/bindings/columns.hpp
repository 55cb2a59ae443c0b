// Columns of numbers that Python gives, such as array('q') and array('d'): read and written in place.
#pragma once

#include <nanobind/nanobind.h>

#include <cstddef>
#include <cstdint>
#include <string>
#include <type_traits>

#include "bindings/py_index.hpp"

namespace kvindex {

template <class Number>
class Column {
 public:
  // Throws ValueError, by the column's name, unless it is a flat buffer of so many such numbers.
  Column(nanobind::handle object, const char* name, size_t rows) {
    constexpr int flags = PyBUF_FORMAT | PyBUF_ND | (std::is_const_v<Number> ? 0 : PyBUF_WRITABLE);
    const bool open = PyObject_GetBuffer(object.ptr(), &buffer_, flags) == 0;
    if (!open) {
      PyErr_Clear();
      buffer_.obj = nullptr;
    }
    if (open && fits(rows)) return;
    if (open) PyBuffer_Release(&buffer_);
    const std::string message = std::string(name) + " must be a column of " +
                                std::to_string(rows) + " numbers, such as array('" + kCode + "')";
    throw nanobind::value_error(message.c_str());
  }
  ~Column() { PyBuffer_Release(&buffer_); }
  Column(const Column&) = delete;
  Column& operator=(const Column&) = delete;

  Number* data() const { return static_cast<Number*>(buffer_.buf); }

 private:
  static constexpr char kCode = std::is_floating_point_v<Number> ? 'd' : 'q';

  bool fits(size_t rows) const {
    const char* const code = buffer_.format == nullptr ? "B" : buffer_.format;
    const bool right = *code == kCode || (*code == 'l' && kCode == 'q');
    return right && code[1] == '\0' && buffer_.itemsize == sizeof(Number) && buffer_.ndim == 1 &&
           static_cast<size_t>(buffer_.len) == rows * sizeof(Number) &&
           (rows == 0 || reinterpret_cast<uintptr_t>(buffer_.buf) % alignof(Number) == 0);
  }

  Py_buffer buffer_{};
};

// A byte for each row: bytes or a bytearray, or anything like it.
class Mask {
 public:
  Mask(nanobind::handle object, const char* name, size_t rows) : bytes_(object) {
    if (bytes_.open() && bytes_.size() == rows) return;
    const std::string message =
        std::string(name) + " must have a byte for each of " + std::to_string(rows) + " rows";
    throw nanobind::value_error(message.c_str());
  }

  const uint8_t* data() const { return bytes_.data(); }

 private:
  SimpleBuffer bytes_;
};

}  // namespace kvindex

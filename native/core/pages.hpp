// Memory of the index, kept apart from the allocator's so that what is freed goes back at once.
#pragma once

#include <cstddef>
#include <cstdint>
#include <utility>

namespace kvindex {

// One stretch of memory: of the allocator's while it is small, whole pages of its own beyond.
class Pages {
 public:
  Pages() = default;

  // Begins at a cache line. Throws std::bad_alloc. The content is not defined.
  explicit Pages(size_t bytes);
  Pages(Pages&& other) noexcept
      : data_(std::exchange(other.data_, nullptr)),
        taken_(std::exchange(other.taken_, nullptr)),
        bytes_(std::exchange(other.bytes_, 0)) {}
  Pages& operator=(Pages&& other) noexcept {
    std::swap(data_, other.data_);
    std::swap(taken_, other.taken_);
    std::swap(bytes_, other.bytes_);
    return *this;
  }
  ~Pages();


  uint8_t* data() const { return data_; }
  size_t bytes() const { return bytes_; }

 private:
  uint8_t* data_ = nullptr;
  void* taken_ = nullptr;  // from the allocator, where `data_` lies
  size_t bytes_ = 0;
};

}  // namespace kvindex

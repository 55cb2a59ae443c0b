// A short list: one element in place, more of them elsewhere; at most 255.
#pragma once

#include <algorithm>
#include <cstdint>
#include <type_traits>

namespace kvindex {

template <class T>
class Few {
  static_assert(std::is_trivially_copyable_v<T> && sizeof(T) <= sizeof(T*));

 public:
  Few() : one_{} {}
  Few(Few&& other) noexcept { take(other); }
  Few& operator=(Few&& other) noexcept {
    if (this != &other) {
      clear();
      take(other);
    }
    return *this;
  }
  ~Few() { clear(); }

  uint8_t size() const { return size_; }
  bool empty() const { return size_ == 0; }
  const T* begin() const { return capacity_ > 1 ? many_ : &one_; }
  const T* end() const { return begin() + size_; }
  T* begin() { return capacity_ > 1 ? many_ : &one_; }
  T* end() { return begin() + size_; }
  const T& back() const { return begin()[size_ - 1]; }
  T& back() { return begin()[size_ - 1]; }

  void insert(T* place, const T& value) {
    const auto at = place - begin();
    if (size_ == capacity_) resize(capacity_ > 100 ? uint8_t{255} : uint8_t(capacity_ * 2));
    std::move_backward(begin() + at, end(), end() + 1);
    begin()[at] = value;
    ++size_;
  }
  void push_back(const T& value) { insert(end(), value); }
  void erase(T* place) {
    std::move(place + 1, end(), place);
    shrink(uint8_t(size_ - 1));
  }
  void assign(const T* values, uint8_t count) {
    if (count > capacity_) resize(count);
    std::copy(values, values + count, begin());
    shrink(count);
  }
  void clear() { shrink(0); }

 private:
  void shrink(uint8_t count) {
    size_ = count;
    if (capacity_ > 1 && count * 4 <= capacity_) resize(std::max<uint8_t>(1, count));
  }
  void resize(uint8_t capacity) {
    T* const from = begin();
    T* const made = capacity > 1 ? new T[capacity] : nullptr;
    const T first = size_ != 0 ? *from : T{};
    if (made != nullptr) std::copy(from, from + size_, made);
    if (capacity_ > 1) delete[] many_;
    if (made != nullptr) {
      many_ = made;
    } else {
      one_ = first;
    }
    capacity_ = capacity;
  }
  void take(Few& other) {
    size_ = other.size_;
    capacity_ = other.capacity_;
    if (capacity_ > 1) {
      many_ = other.many_;
    } else {
      one_ = other.one_;
    }
    other.one_ = T{};
    other.size_ = 0;
    other.capacity_ = 1;
  }

  union {
    T one_;
    T* many_;
  };
  uint8_t size_ = 0;
  uint8_t capacity_ = 1;
};

}  // namespace kvindex

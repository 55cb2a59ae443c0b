// Engines' labels of blocks: 64-bit ints as they are, digests of bytes by a number of our own.
#pragma once

#include <compare>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "core/label_table.hpp"
#include "core/prefix_key.hpp"

namespace kvindex {

struct Label {
  uint64_t value = 0;   // the int modulo 2**64, or the number of a name
  bool named = false;

  bool operator==(const Label&) const = default;
  auto operator<=>(const Label&) const = default;
};

// Secret, as in `LabelTable`: so that an engine cannot aim at one bucket.
class LabelHash {
 public:
  explicit LabelHash(const Scramble& scramble) : scramble_(&scramble) {}

  size_t operator()(const Label& label) const {
    return static_cast<size_t>((*scramble_)(label.value + label.named));
  }

 private:
  const Scramble* scramble_;
};

// Likewise for the bytes of a label.
class NameHash {
 public:
  using is_transparent = void;

  explicit NameHash(const KeyMaker& keys) : keys_(&keys) {}

  size_t operator()(std::string_view name) const { return static_cast<size_t>(keys_->root(name)); }

 private:
  const KeyMaker* keys_;
};

// The byte labels in use, each stored once. Owned by the index, under its lock.
class LabelNames {
 public:
  static constexpr uint64_t kUnknown = ~uint64_t{0};

  explicit LabelNames(const KeyMaker& keys) : numbers_(0, NameHash(keys)) {}

  // The number of a name, or kUnknown.
  uint64_t find(std::string_view name) const {
    const auto found = numbers_.find(name);
    return found == numbers_.end() ? kUnknown : found->second;
  }

  // The number of a name that is new or known. It lives until it is released as often as acquired:
  // a new one must be acquired at once.
  uint64_t number(std::string_view name) {
    const auto [place, is_new] = numbers_.try_emplace(std::string(name), 0);
    if (is_new) {
      if (free_.empty()) {
        free_.push_back(names_.size());
        names_.emplace_back();
      }
      place->second = free_.back();
      free_.pop_back();
      names_[place->second] = {&place->first, 0};
    }
    return place->second;
  }

  // Make room for so many further names, if they are many beside those that are there.
  void reserve(size_t names) {
    if (names <= numbers_.size()) return;
    numbers_.reserve(numbers_.size() + names);
    names_.reserve(names_.size() + names);
  }

  void acquire(const Label& label) {
    if (label.named) ++names_[label.value].users;
  }
  void release(const Label& label) {
    if (label.named && --names_[label.value].users == 0) forget(label);
  }

  const std::string& text(const Label& label) const { return *names_[label.value].text; }
  size_t size() const { return numbers_.size(); }

 private:
  struct Name {
    const std::string* text = nullptr;
    uint64_t users = 0;
  };

  void forget(const Label& label) {
    numbers_.erase(*names_[label.value].text);
    names_[label.value] = Name{};
    free_.push_back(label.value);
  }

  std::unordered_map<std::string, uint64_t, NameHash, std::equal_to<>> numbers_;
  std::vector<Name> names_;
  std::vector<uint64_t> free_;
};

}  // namespace kvindex

// Owners: the (rank, medium, group) places that blocks can be resident in.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "core/owner_sets.hpp"

namespace kvindex {

// Names of media, kept as long as the index: answers refer to them.
class Media {
 public:
  static constexpr size_t kMost = 4096;  // against a publisher that invents ever new ones

  // Those of engines are there from the beginning: nobody can use up the room for them.
  Media() {
    for (const char* known : {"GPU", "CPU", "CPU_PINNED", "DISK", "EXTERNAL", "STORAGE", "FS", "OBJ"}) {
      name(known);
    }
  }

  // The one copy of a name; null if there are too many.
  const std::string* name(std::string_view text) {
    const auto found = names_.find(std::string(text));
    if (found != names_.end()) return found->second.get();
    if (names_.size() == kMost) return nullptr;
    auto made = std::make_unique<const std::string>(text);
    return names_.emplace(*made, std::move(made)).first->second.get();
  }

 private:
  std::unordered_map<std::string, std::unique_ptr<const std::string>> names_;
};

// How far a medium is from the device; the twin of `kvindex.wire.quirks.medium_tier`.
uint8_t medium_tier(std::string_view folded_medium);
// Whether an engine keeps a medium's blocks when it announces that all are cleared; likewise.
bool outlives_clear(std::string_view folded_medium, bool resets_connector);

struct Owner {
  uint32_t rank = 0;  // the rank's slot
  uint32_t group_idx = 0;
  const std::string* medium = nullptr;
  uint8_t tier = 0;    // of the medium
  uint32_t chunk = 0;  // tokens of its blocks, off the device; 0: they are the group's
};

// All owners by number. Owned by the index, under its lock.
class Owners {
 public:
  OwnerId make(const Owner& owner) {
    if (free_.empty()) {
      owners_.push_back(owner);
      return static_cast<OwnerId>(owners_.size() - 1);
    }
    const OwnerId id = free_.back();
    free_.pop_back();
    owners_[id] = owner;
    return id;
  }
  void drop(OwnerId id) { free_.push_back(id); }

  const Owner& operator[](OwnerId id) const { return owners_[id]; }
  size_t size() const { return owners_.size(); }

 private:
  std::vector<Owner> owners_;
  std::vector<OwnerId> free_;
};

}  // namespace kvindex

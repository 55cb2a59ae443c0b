// Places of blocks that no event names whole, proven by vLLM's own hash chain.
//
// The Python twin, kvindex/index/reference/keys.py, says why. Owned by the index, under its lock.
#pragma once

#include <cstddef>
#include <cstdint>
#include <list>
#include <optional>
#include <string_view>
#include <unordered_map>
#include <utility>
#include <vector>

#include "core/batch.hpp"
#include "core/hold.hpp"
#include "core/label.hpp"
#include "core/prefix_key.hpp"
#include "core/sha256.hpp"

namespace kvindex {

class Proofs {
 public:
  // One unit of a chain.
  struct Step {
    Sha256 hash{};  // the engine's, of it and all before it
    std::optional<uint64_t> parent;  // the key of the step before it; none at a prompt's start
    Digest content;  // of the unit in the tree: the caller's to fill in
    bool salted = false;  // whether it starts a prompt under a salt

    uint64_t key() const { return load_big_endian<uint64_t>(hash.data() + 24); }
    std::string_view text() const {
      return {reinterpret_cast<const char*>(hash.data()), hash.size()};
    }
  };

  explicit Proofs(const Scramble& scramble) : found_(0, LabelHash(scramble)) {}

  // Forget the chains.
  void clear();

  // The steps of an event's tokens, without their contents, or none if they cannot be known.
  bool chain(const Batch& batch, const Event& event, uint32_t unit, std::vector<Step>& steps,
             Hold& hold);
  // Which blocks of a chain, each of `scale` steps, an event's labels name; false if unsure.
  static bool find(const Batch& batch, const Event& event, const std::vector<Step>& steps,
                   size_t scale, std::vector<size_t>& places);
  // Remember a chain for later events.
  void keep(const std::vector<Step>& steps, uint32_t unit);
  // A step to go back over, unless too many were; or nullptr.
  const Step* look(uint64_t key);
  // By what the step of a label is found, if it is one of vLLM's.
  static std::optional<uint64_t> key(const Batch& batch, const WireHash& label);

 private:
  static constexpr uint64_t kLooks = 1 << 17;
  using Kept = std::list<std::pair<uint64_t, Step>>;

  Kept kept_;  // the oldest first
  std::unordered_map<Label, Kept::iterator, LabelHash> found_;
  uint64_t looks_ = kLooks;
};

}  // namespace kvindex

// Batches of events made by hand, and an index to apply them to.
#pragma once

#include <cstdint>
#include <optional>
#include <string_view>
#include <vector>

#include "core/index.hpp"
#include "tests/expect.hpp"

namespace kvindex::tests {

class MadeBatch {
 public:
  MadeBatch& stored(const std::vector<uint64_t>& labels, std::optional<uint64_t> parent,
                    const std::vector<uint32_t>& tokens, uint32_t block_size,
                    std::string_view medium = "GPU") {
    Event& event = add(EventKind::stored, labels, medium);
    event.block_size = block_size;
    event.has_parent = parent.has_value();
    event.parent = {parent.value_or(0), 0};
    event.tokens_begin = static_cast<uint32_t>(batch.tokens.size());
    event.tokens_count = static_cast<uint32_t>(tokens.size());
    batch.tokens.insert(batch.tokens.end(), tokens.begin(), tokens.end());
    return *this;
  }
  MadeBatch& removed(const std::vector<uint64_t>& labels, std::string_view medium = "GPU") {
    add(EventKind::removed, labels, medium);
    return *this;
  }
  MadeBatch& cleared() {
    add(EventKind::cleared, {}, "GPU");
    return *this;
  }

  Batch batch;

 private:
  Event& add(EventKind kind, const std::vector<uint64_t>& labels, std::string_view medium) {
    Event event;
    event.kind = kind;
    event.medium = {static_cast<uint32_t>(batch.bytes.size()),
                    static_cast<uint32_t>(medium.size())};
    batch.bytes.insert(batch.bytes.end(), medium.begin(), medium.end());
    event.hashes_begin = static_cast<uint32_t>(batch.hashes.size());
    event.hashes_count = static_cast<uint32_t>(labels.size());
    for (const uint64_t label : labels) batch.hashes.push_back({label, 0});
    batch.events.push_back(event);
    return batch.events.back();
  }
};

inline KeyMaker::Secrets made_secrets(uint64_t seed) {
  Choices choices(seed);
  KeyMaker::Secrets words;
  for (uint64_t& word : words) word = choices.word();
  return words;
}

inline Index made_index(uint64_t seed, std::optional<uint64_t> max_blocks = std::nullopt,
                        size_t max_orphans = 16'384,
                        Index::BeforeWaiting before_waiting = [] {}) {
  Choices choices(seed);
  const Scramble scramble(choices.word(), choices.word(), choices.word());
  return Index(made_secrets(seed), scramble, max_blocks, std::nullopt, max_orphans, before_waiting);
}

inline CacheSettings made_settings(uint32_t group_idx, const GroupSpec& spec) {
  CacheSettings settings;
  settings.groups[group_idx] = spec;
  return settings;
}

// The settings of one group, and nothing else.
inline CacheSettings made_settings(uint32_t group_idx, std::string_view kind,
                                   std::optional<int64_t> window = std::nullopt) {
  CacheSettings settings;
  settings.groups[group_idx] = GroupSpec{std::string(kind), window, std::nullopt};
  return settings;
}

inline Query made_query(const std::vector<uint32_t>& tokens) {
  Query query;
  query.tokens = {TokenView::Kind::u32, tokens.data(), tokens.size(), tokens.size()};
  return query;
}

}  // namespace kvindex::tests

// What the core does without Python around it: nanoseconds of single operations.
//
// Prints a line for each measure: its name, a tab, and the median. `python -m benchmarks
// --native-bench PATH` puts them into the tables.
#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstring>
#include <random>
#include <vector>

#include "core/index.hpp"

namespace {

using namespace kvindex;
using Clock = std::chrono::steady_clock;

constexpr uint32_t kBlockSize = 16;
constexpr uint32_t kVocabulary = 150'000;

std::mt19937_64 random_words(7);

KeyMaker::Secrets secrets() {
  KeyMaker::Secrets words;
  for (uint64_t& word : words) word = random_words();
  return words;
}

std::vector<uint32_t> prompt(size_t blocks) {
  std::vector<uint32_t> tokens(blocks * kBlockSize);
  for (uint32_t& token : tokens) token = static_cast<uint32_t>(random_words() % kVocabulary);
  return tokens;
}

// A batch with one BlockStored of a whole prompt, or of a part after a parent.
Batch stored(const std::vector<uint64_t>& labels, const uint32_t* tokens, const uint64_t* parent) {
  Batch batch;
  Event event;
  event.kind = EventKind::stored;
  event.block_size = kBlockSize;
  event.medium = {0, 3};
  batch.bytes.assign({'G', 'P', 'U'});
  if (parent != nullptr) {
    event.has_parent = true;
    event.parent = {*parent, 0};
  }
  for (const uint64_t label : labels) batch.hashes.push_back({label, 0});
  event.hashes_count = static_cast<uint32_t>(labels.size());
  batch.tokens.assign(tokens, tokens + labels.size() * kBlockSize);
  event.tokens_count = static_cast<uint32_t>(batch.tokens.size());
  batch.events.push_back(event);
  return batch;
}

std::vector<uint64_t> labels(size_t count) {
  std::vector<uint64_t> made(count);
  for (uint64_t& label : made) label = random_words();
  return made;
}

double nanoseconds(Clock::time_point from, Clock::time_point to, size_t operations) {
  return std::chrono::duration<double, std::nano>(to - from).count() /
         static_cast<double>(operations);
}

void report(const char* name, std::vector<double> times) {
  std::sort(times.begin(), times.end());
  std::printf("%s\t%.1f\n", name, times[times.size() / 2]);
}

Index make_index() {
  return Index(secrets(), Scramble(random_words(), random_words(), random_words()), std::nullopt,
               std::nullopt, 16'384);
}

void measure_digests() {
  const KeyMaker keys(secrets());
  const std::vector<uint32_t> tokens = prompt(512);
  std::vector<double> times;
  Key key = 0;
  for (int round = 0; round < 2'000; ++round) {
    const auto from = Clock::now();
    for (size_t block = 0; block < 512; ++block) {
      key = keys.child(key, keys.tokens(tokens.data() + block * kBlockSize, kBlockSize));
    }
    times.push_back(nanoseconds(from, Clock::now(), 1));
  }
  if (key == 1) std::puts("");
  report("hash 8,192 tokens to 512 keys", times);
}

// Keys that are there already: the walk alone.
struct ReadyKeys {
  const std::vector<Key>& keys;
  size_t ready(size_t count) const { return std::min(count, keys.size()); }
  Key operator[](size_t i) const { return keys[i]; }
};

void measure_prehashed(size_t prompts, size_t operations) {
  const KeyMaker maker(secrets());
  Tree tree(maker);
  const RootId root = tree.enter(kBlockSize, 0, "");
  std::vector<std::vector<Key>> keys(prompts);
  std::vector<Stretch> chain;
  for (std::vector<Key>& some : keys) {
    const std::vector<uint32_t> tokens = prompt(64);
    std::vector<Digest> contents;
    Key key = tree.root(root).key;
    for (size_t block = 0; block < 64; ++block) {
      contents.push_back(maker.tokens(tokens.data() + block * kBlockSize, kBlockSize));
      some.push_back(key = maker.child(key, contents.back()));
    }
    chain.clear();
    tree.extend(kNoBlock, root, contents.data(), contents.size(), chain);
    for (const Stretch& stretch : chain) {
      for (OwnerId owner = 0; owner < 4; ++owner) tree.own(stretch, owner);
    }
  }
  std::vector<double> times;
  uint64_t matched = 0;
  for (size_t i = 0; i < operations; ++i) {
    const ReadyKeys ready{keys[random_words() % prompts]};
    if (ready[63] == 1) std::puts("");  // the prompt's keys are at hand, the tree's are not
    const auto from = Clock::now();
    tree.walk(root, ready, [&](SetId set, uint32_t, uint32_t stop) {
      tree.sets().for_each(set, [&](OwnerId owner) { matched += owner + stop; });
      return true;
    });
    times.push_back(nanoseconds(from, Clock::now(), 1));
  }
  if (matched == 1) std::puts("");
  char name[64];
  std::snprintf(name, sizeof name, "match pre-hashed 64 blocks of %zu prompts", prompts);
  report(name, times);
}

void measure_apply(size_t blocks_a_store, size_t ranks, size_t blocks) {
  std::vector<Batch> batches;
  std::vector<uint32_t> tokens;
  uint64_t parent = 0;
  size_t depth = 0;
  for (size_t i = 0; i < blocks; i += blocks_a_store) {
    tokens = prompt(blocks_a_store);
    const std::vector<uint64_t> made = labels(blocks_a_store);
    batches.push_back(stored(made, tokens.data(), depth % 64 == 0 ? nullptr : &parent));
    parent = made.back();
    depth += blocks_a_store;
  }
  std::vector<double> times;
  for (int round = 0; round < 9; ++round) {
    Index index = make_index();
    std::vector<uint32_t> ids;
    for (size_t rank = 0; rank < ranks; ++rank) ids.push_back(index.add());
    const auto from = Clock::now();
    for (size_t i = 0; i < batches.size(); ++i) {
      // A prompt's blocks go to one rank.
      index.apply(ids[i * blocks_a_store / 64 % ranks], batches[i]);
    }
    times.push_back(nanoseconds(from, Clock::now(), blocks));
  }
  char name[64];
  std::snprintf(name, sizeof name, "apply a block, %zu a store, %zu ranks", blocks_a_store, ranks);
  report(name, times);
}

// A prompt of 8,192 tokens; half of the ranks hold all of it, the others an eighth to all.
void measure_match(size_t ranks) {
  Index index = make_index();
  const std::vector<uint32_t> tokens = prompt(512);
  const std::vector<uint64_t> made = labels(512);
  for (size_t rank = 0; rank < ranks; ++rank) {
    const uint32_t id = index.add();
    const size_t stores = rank % 2 == 0 ? 8 : 1 + rank % 8;
    for (size_t i = 0; i < stores; ++i) {
      const std::vector<uint64_t> some(made.begin() + static_cast<long>(i * 64),
                                       made.begin() + static_cast<long>(i * 64 + 64));
      index.apply(id, stored(some, tokens.data() + i * 1024, i == 0 ? nullptr : &made[i * 64 - 1]));
    }
  }
  Query query;
  query.tokens = {TokenView::Kind::u32, tokens.data(), tokens.size(), tokens.size()};
  std::vector<double> times;
  for (int round = 0; round < 5'000; ++round) {
    Answer answer;
    const auto from = Clock::now();
    index.match(query, answer);
    times.push_back(nanoseconds(from, Clock::now(), 1));
  }
  char name[64];
  std::snprintf(name, sizeof name, "match 8,192 tokens, %zu ranks", ranks);
  report(name, times);
}

}  // namespace

int main() {
  measure_digests();
  measure_prehashed(1, 20'000);
  measure_prehashed(100'000, 200'000);
  measure_match(64);
  measure_match(512);
  measure_apply(64, 64, 400'000);
  measure_apply(64, 1, 400'000);
  measure_apply(1, 64, 200'000);
  measure_apply(1, 1, 200'000);
  return 0;
}

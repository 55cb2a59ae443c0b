// Many threads ask while others change everything: each answer is one that some moment could give.
//
// Its point is to run under ThreadSanitizer; the answers are checked all the same.
#include <algorithm>
#include <array>
#include <atomic>
#include <functional>
#include <thread>
#include <utility>
#include <vector>

#include "core/rw_lock.hpp"
#include "core/snapshot.hpp"
#include "tests/expect.hpp"
#include "tests/made_batch.hpp"

namespace {

using namespace kvindex;
using namespace kvindex::tests;

constexpr uint32_t kBlockSize = 4;
constexpr uint32_t kBlocks = 150;
constexpr uint32_t kKept = 40;  // blocks of the growing rank that are never removed

std::vector<uint32_t> tokens(uint32_t from, uint32_t to) {
  std::vector<uint32_t> all;
  for (uint32_t token = from * kBlockSize; token < to * kBlockSize; ++token) all.push_back(token);
  return all;
}

Batch stored(uint32_t from, uint32_t to) {
  std::vector<uint64_t> labels;
  for (uint32_t block = from; block < to; ++block) labels.push_back(1000 + block);
  std::optional<uint64_t> parent;
  if (from != 0) parent = 999 + from;
  return MadeBatch().stored(labels, parent, tokens(from, to), kBlockSize).batch;
}

Batch removed(uint32_t from, uint32_t to) {
  std::vector<uint64_t> labels;
  for (uint32_t block = from; block < to; ++block) labels.push_back(1000 + block);
  return MadeBatch().removed(labels).batch;
}

class Crowd {
 public:
  explicit Crowd(int turns) : turns_(turns), index_(made_index(1)) {
    steady_ = index_.add();
    growing_ = index_.add();
    cleared_ = index_.add();
    index_.apply(steady_, stored(0, kBlocks));
    index_.apply(growing_, stored(0, kBlocks));
  }

  void run() {
    std::vector<std::thread> changing;
    changing.emplace_back([this] { cut_and_grow(); });
    changing.emplace_back([this] { clear_again(); });
    changing.emplace_back([this] { come_and_go(); });
    changing.emplace_back([this] { dump_and_restore(); });
    std::vector<std::thread> asking;
    for (uint64_t i = 0; i < 4; ++i) asking.emplace_back([this, i] { ask(i); });
    asking.emplace_back([this] { look(); });
    asking.emplace_back([this] { picture(); });
    for (std::thread& thread : changing) thread.join();
    done_ = true;
    for (std::thread& thread : asking) thread.join();
    index_.check();
    EXPECT(index_.size(steady_) == kBlocks && index_.size(growing_) == kBlocks);
    EXPECT(asked_ > 0);
    for (const Index::RankId rank : {steady_, growing_, cleared_}) index_.remove(rank);
    EXPECT(index_.size() == 0 && index_.statistics().unique_blocks == 0);
  }

 private:
  // Blocks go from the end backwards, so that a rank always holds a beginning.
  void cut_and_grow() {
    const Batch middle = removed(kBlocks / 2, kBlocks);
    const Batch rest = removed(kKept, kBlocks / 2);
    const Batch grown = stored(kKept, kBlocks);
    for (int turn = 0; turn < turns_; ++turn) {
      EXPECT(index_.apply(growing_, middle));
      EXPECT(index_.apply(growing_, rest));
      EXPECT(index_.apply(growing_, grown));
    }
  }

  void clear_again() {
    const Batch whole = stored(0, kBlocks);
    for (int turn = 0; turn < turns_; ++turn) {
      EXPECT(index_.apply(cleared_, whole));
      EXPECT(index_.clear(cleared_));
    }
  }

  void come_and_go() {
    const Batch part = stored(0, kBlocks / 3);
    for (int turn = 0; turn < turns_; ++turn) {
      const Index::RankId rank = index_.add();
      EXPECT(index_.apply(rank, part));
      index_.configure(rank, made_settings(1, {"mamba", std::nullopt, std::nullopt}));
      index_.set_order({rank, steady_, growing_});
      EXPECT(index_.remove(rank));
      EXPECT(!index_.apply(rank, part));
    }
  }

  // Another index is made to hold what the growing rank holds, and this one what it held.
  void dump_and_restore() {
    Index other = made_index(1);
    const Index::RankId copied = other.add();
    for (int turn = 0; turn < turns_ / 10; ++turn) {
      const std::string bytes = write_image(index_.image(growing_).value());
      const RankImage image =
          read_image(reinterpret_cast<const uint8_t*>(bytes.data()), bytes.size());
      other.restore(copied, image);
      EXPECT(other.size() >= kKept && other.size() <= kBlocks);
      EXPECT(index_.restore(steady_, index_.image(steady_).value()) == steady_);
    }
    other.check();
  }

  void ask(uint64_t seed) {
    Choices choices(seed);
    const std::vector<uint32_t> prompt = tokens(0, kBlocks);
    Answer answer;
    while (!done_) {
      Query query = made_query(prompt);
      if (choices.once_in(4)) query.ranks = {{steady_, growing_}};
      if (choices.once_in(2)) {
        index_.match(query, answer);
      } else if (!index_.try_match(query, answer)) {
        continue;
      }
      check(answer);
      ++asked_;
    }
  }

  void check(const Answer& answer) const {
    bool steady_found = false;
    bool growing_found = false;
    for (const FoundRank& found : answer.ranks) {
      EXPECT(found.tokens == found.blocks() * kBlockSize && found.media_count == 1);
      EXPECT(*answer.media[found.media_begin].medium == "GPU");
      if (found.rank == steady_) {
        steady_found = true;
        EXPECT(found.blocks() == kBlocks);
      } else if (found.rank == growing_) {
        growing_found = true;
        const std::array<uint32_t, 3> possible{kKept, kBlocks / 2, kBlocks};
        EXPECT(std::find(possible.begin(), possible.end(), found.blocks()) != possible.end());
      } else if (found.rank == cleared_) {
        EXPECT(found.blocks() == kBlocks);
      } else {
        EXPECT(found.blocks() == kBlocks / 3);
      }
    }
    EXPECT(steady_found && growing_found);
    EXPECT(answer.ranks[static_cast<size_t>(answer.best)].blocks() == kBlocks);
  }

  void look() {
    while (!done_) {
      const TreeStatistics statistics = index_.statistics();
      EXPECT(statistics.unique_blocks == kBlocks && statistics.blocks >= kBlocks + kKept);
      EXPECT(index_.statistics(growing_)->blocks >= kKept);
      EXPECT(index_.walk(steady_)->size() == kBlocks);
      EXPECT(index_.block_sizes("") == std::vector<uint32_t>{kBlockSize});
      index_.check();
    }
  }

  void picture() {
    const RankRows rows({steady_, growing_, cleared_});
    while (!done_) {
      const PrefixTree found = index_.prefixes(10, 1, rows, false);
      uint32_t depth = 0;
      for (const PrefixNode& node : found.nodes) {  // all prompts are one
        EXPECT(node.depth == depth && node.left_out == node.children - (node.children != 0));
        EXPECT(found.holdings[node.holding].ranks != 0);
        depth += node.blocks;
      }
      EXPECT(depth == kBlocks && found.unique_blocks == kBlocks);
    }
  }

  const int turns_;
  Index index_;
  Index::RankId steady_ = 0;
  Index::RankId growing_ = 0;
  Index::RankId cleared_ = 0;
  std::atomic<bool> done_{false};
  std::atomic<uint64_t> asked_{0};
};

// Each reader gives the lock back only when another one has it, so it is never free: a writer gets
// in all the same, before a count of readings that is out of all proportion.
class Overlapping {
 public:
  void run() {
    std::vector<std::thread> readers;
    for (int i = 0; i < 3; ++i) readers.emplace_back([this] { read(); });
    while (readings_ < 100) std::this_thread::yield();
    for (int turn = 0; turn < 10; ++turn) {
      const uint64_t before = readings_;
      lock_.lock();
      EXPECT(readings_ < before + kTooMany);
      lock_.unlock();
    }
    done_ = true;
    for (std::thread& reader : readers) reader.join();
  }

 private:
  static constexpr uint64_t kTooMany = 100'000;

  void read() {
    while (!done_ && readings_ < 10 * kTooMany) {
      lock_.lock_shared();
      const uint64_t mine = ++readings_;
      for (int i = 0; i < 1000 && readings_ == mine; ++i) std::this_thread::yield();
      lock_.unlock_shared();
    }
  }

  RwLock lock_;
  std::atomic<uint64_t> readings_{0};
  std::atomic<bool> done_{false};
};
constexpr uint32_t kLong = 5 * Hold::kBlocks;

Batch long_chain(uint32_t blocks, uint64_t first_label) {
  std::vector<uint64_t> labels;
  std::vector<uint32_t> all;
  for (uint32_t block = 0; block < blocks; ++block) {
    labels.push_back(first_label + block);
    all.push_back(block);
  }
  return MadeBatch().stored(labels, std::nullopt, all, 1).batch;
}

uint32_t held(const Index& index, Index::RankId rank) {
  const Batch prompt = long_chain(kLong, 1);
  Answer answer;
  index.match(made_query(prompt.tokens), answer);
  for (const FoundRank& found : answer.ranks) {
    if (found.rank == rank) return found.blocks();
  }
  return 0;
}

// What this thread does once, when its change pauses.
thread_local std::function<void()> at_pause;

void do_at_pause() {
  if (const auto work = std::exchange(at_pause, nullptr)) work();
}

// While a long change of a rank pauses, others change theirs, by long batches too, and whoever needs
// that rank whole waits.
void change_long(bool remove) {
  Index index = made_index(2, std::nullopt, 16, &do_at_pause);
  const Index::RankId rank = index.add();
  const Index::RankId other = index.add();
  std::thread waiting;
  bool paused = false;
  at_pause = [&] {
    paused = true;
    waiting = std::thread([&] {
      if (remove) {
        EXPECT(index.remove(rank));
      } else {
        EXPECT(index.image(rank)->resident() == kLong);
      }
    });
    EXPECT(held(index, rank) <= kLong);
    EXPECT(index.apply(other, long_chain(kLong / 2, 1'000'000)));
    EXPECT(index.apply(other, MadeBatch().removed({1'000'000 + kLong / 2 - 1}).batch));
    EXPECT(held(index, other) == kLong / 2 - 1);
    EXPECT(index.clear(other));
  };
  EXPECT(index.apply(rank, long_chain(kLong, 1)));
  EXPECT(paused);
  waiting.join();
  index.check();
  EXPECT(held(index, rank) == (remove ? 0 : kLong));
  EXPECT(index.size() == (remove ? 0 : kLong));
}

// Many threads change the same rank by long batches; each batch is whole.
void change_one_rank(int turns) {
  Index index = made_index(3);
  const Index::RankId rank = index.add();
  const auto work = [&](uint32_t blocks) {
    const Batch chain = long_chain(blocks, blocks);
    for (int turn = 0; turn < turns; ++turn) {
      EXPECT(index.apply(rank, MadeBatch().cleared().batch));
      EXPECT(index.apply(rank, chain));
      EXPECT(index.image(rank).has_value());
      EXPECT(held(index, rank) <= kLong);
    }
  };
  std::thread one([&] { work(kLong); });
  std::thread another([&] { work(kLong - 3); });
  one.join();
  another.join();
  index.check();
  EXPECT(index.clear(rank));
  EXPECT(index.size() == 0 && index.statistics().unique_blocks == 0);
}

}  // namespace

int main() {
  Overlapping().run();
  Crowd(rounds(1500)).run();
  Crowd(rounds(1500)).run();
  change_long(false);
  change_long(true);
  change_one_rank(rounds(20));
}

// Memory runs out at each allocation in turn, while events are applied and prompts are asked for.
//
// Nothing may crash, hang or leak; an index that was left half changed must not answer any more, and
// one that was not must be whole.
#include <algorithm>
#include <cstdlib>
#include <new>
#include <string>
#include <vector>

#include "core/snapshot.hpp"
#include "tests/expect.hpp"
#include "tests/made_batch.hpp"

namespace {

size_t allocations_left = ~size_t{0};

}  // namespace

[[gnu::noinline]] void* operator new(size_t size) {
  if (allocations_left != ~size_t{0} && allocations_left-- == 0) {
    allocations_left = 0;  // it does not come back by itself
    throw std::bad_alloc();
  }
  if (void* const made = std::malloc(size == 0 ? 1 : size)) return made;
  throw std::bad_alloc();
}
[[gnu::noinline]] void* operator new[](size_t size) { return operator new(size); }
[[gnu::noinline]] void operator delete(void* memory) noexcept { std::free(memory); }
[[gnu::noinline]] void operator delete[](void* memory) noexcept { std::free(memory); }
[[gnu::noinline]] void operator delete(void* memory, size_t) noexcept { std::free(memory); }
[[gnu::noinline]] void operator delete[](void* memory, size_t) noexcept { std::free(memory); }

namespace {

using namespace kvindex;
using namespace kvindex::tests;

constexpr uint32_t kBlockSize = 2;

std::vector<uint32_t> tokens(uint32_t from, uint32_t to, uint32_t first = 0) {
  std::vector<uint32_t> all;
  for (uint32_t i = from * kBlockSize; i < to * kBlockSize; ++i) all.push_back(first + i);
  return all;
}

std::vector<uint64_t> labels(uint32_t from, uint32_t to, uint64_t first = 1) {
  std::vector<uint64_t> all;
  for (uint32_t i = from; i < to; ++i) all.push_back(first + i);
  return all;
}

// What each round tells, an event at a time: together they come by every kind of allocation.
std::vector<Batch> story() {
  std::vector<Batch> all;
  const auto tell = [&](MadeBatch& made) { all.push_back(std::move(made.batch)); };
  const auto store = [&](uint32_t from, uint32_t to, uint64_t first, std::string medium = "GPU") {
    std::optional<uint64_t> parent;
    if (from != 0) parent = first + from - 1;
    tell(MadeBatch().stored(labels(from, to, first), parent, tokens(from, to), kBlockSize, medium));
  };
  store(0, 150, 1);                                              // several strands
  store(170, 200, 1);                                            // orphans
  store(150, 170, 1);                                            // what they wait for
  tell(MadeBatch().removed(labels(40, 60)));                     // a hole
  tell(MadeBatch().stored(labels(40, 90, 5000), 40, tokens(40, 90, 9), kBlockSize));  // a fork
  store(30, 35, 1, "CPU");                                       // another place
  tell(MadeBatch().stored(labels(30, 34), 30, tokens(30, 34), kBlockSize));  // further copies
  tell(MadeBatch().stored({7, 8}, 40, tokens(0, 2, 77), kBlockSize));  // labels of several blocks
  tell(MadeBatch().removed({7}));                                // of which one goes away
  tell(MadeBatch().stored({70'001, 70'002}, 100, tokens(100, 102), kBlockSize));  // second labels
  tell(MadeBatch().stored({70'001, 90}, std::nullopt, {}, 0));   // places without tokens
  tell(MadeBatch().removed(labels(0, 130)));
  return all;
}

template <class Call>
bool runs_out(Call&& call) {
  try {
    call();
  } catch (const std::bad_alloc&) {
    return true;
  }
  return false;
}

// Whether the index says, whatever it is asked, that it was left half changed.
bool is_half_done(Index& index, Index::RankId rank, const Batch& event) {
  Answer answer;
  const std::vector<uint32_t> prompt = tokens(0, 10);
  const Query query = made_query(prompt);
  const std::vector<bool> reported{
      runs_out([&] { index.apply(rank, event); }), runs_out([&] { index.match(query, answer); }),
      runs_out([&] { index.try_match(query, answer); }), runs_out([&] { index.add(); }),
      runs_out([&] { index.size(); }), runs_out([&] { index.walk(rank); }),
      runs_out([&] { index.image(rank); }), runs_out([&] { index.restore(std::nullopt, RankImage()); }),
      runs_out([&] { index.statistics(rank); }), runs_out([&] { index.check(); })};
  const auto count = std::count(reported.begin(), reported.end(), true);
  EXPECT(count == 0 || count == static_cast<ptrdiff_t>(reported.size()));
  return count != 0;
}

// Say whether memory ran out at this allocation.
bool fails_at(size_t allocation, const std::vector<Batch>& events) {
  const std::vector<uint32_t> prompt = tokens(0, 200);
  const Query query = made_query(prompt);
  Answer answer;
  Index index = made_index(5);
  const Index::RankId first = index.add();
  EXPECT(index.apply(first, events[0]));
  allocations_left = allocation;
  Index::RankId rank = first;
  const bool failed = runs_out([&] {
    rank = index.add();
    index.set_order({rank, first});
    for (const Batch& event : events) {
      index.apply(rank, event);
      index.match(query, answer);
    }
    index.configure(rank, made_settings(1, {"sliding_window", 3, std::nullopt}));
    index.match(query, answer);
    EXPECT(index.walk(rank).has_value() && index.statistics(rank).has_value());
    index.check();
    const std::string bytes = write_image(index.image(rank).value());
    const auto* const data = reinterpret_cast<const uint8_t*>(bytes.data());
    index.restore(rank, read_image(data, bytes.size()));
    index.remove(index.restore(std::nullopt, read_image(data, bytes.size())));
    index.clear(rank);
    index.remove(rank);
  });
  allocations_left = ~size_t{0};
  if (!is_half_done(index, first, events[0])) {
    index.check();
    index.match(query, answer);
    EXPECT(answer.ranks[static_cast<size_t>(answer.best)].blocks() >= 150);
    index.remove(first);
    if (rank != first) index.remove(rank);
    index.check();
    EXPECT(index.size() == 0 && index.statistics().unique_blocks == 0);
  }
  return failed;
}

}  // namespace

int main() {
  const std::vector<Batch> events = story();
  size_t allocation = 0;
  while (fails_at(allocation, events)) ++allocation;
  EXPECT(allocation > 100);
}

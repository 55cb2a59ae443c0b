// Ranks as images and bytes and back: what is restored holds, answers and goes on as what was
// dumped; and no bytes, whatever they say, make an index that is not whole.
#include <algorithm>
#include <map>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "core/snapshot.hpp"
#include "tests/expect.hpp"
#include "tests/made_batch.hpp"

namespace {

using namespace kvindex;
using namespace kvindex::tests;

constexpr uint32_t kBlockSize = 2;
constexpr uint32_t kBlocks = 200;  // of a prompt: more than three strands
constexpr size_t kRanks = 3;

// A prompt of its own from block `fork` on; before it the common one.
std::vector<uint32_t> tokens(uint32_t prompt, uint32_t fork, uint32_t from, uint32_t to) {
  std::vector<uint32_t> all;
  for (uint32_t block = from; block < to; ++block) {
    const uint32_t first = (block < fork ? 0 : prompt * 10'000) + block * kBlockSize;
    for (uint32_t i = 0; i < kBlockSize; ++i) all.push_back(first + i);
  }
  return all;
}

// Random events of a few prompts, with everything that makes labels and copies odd.
class Story {
 public:
  explicit Story(Choices& choices)
      : choices_(choices), has_bytes_(choices.once_in(2)), odd_(choices.once_in(2) ? 6 : 40) {}

  Batch next() {
    MadeBatch made;
    for (uint32_t events = 1 + choices_.below(3); events != 0; --events) add(made);
    if (has_bytes_) name_labels(made.batch);
    return std::move(made.batch);
  }

 private:
  void add(MadeBatch& made) {
    const uint32_t prompt = choices_.below(4);
    const uint32_t from = choices_.once_in(3) ? 0 : choices_.below(kBlocks);
    const uint32_t to = std::min(kBlocks, from + 1 + choices_.below(choices_.once_in(2) ? 5 : 120));
    const char* const medium = choices_.once_in(4) ? "CPU" : "GPU";
    switch (choices_.below(12)) {
      case 0:
        if (choices_.once_in(30)) made.cleared();
        return;
      case 1:  // places without tokens
        made.stored(labels(prompt, from, std::min(to, from + 4)), std::nullopt, {}, 0, medium);
        return;
      case 2: case 3: case 4:
        made.removed(labels(prompt, from, to), medium);
        return;
      default:
        break;
    }
    std::optional<uint64_t> parent;
    if (from != 0) parent = label(prompt, from - 1);
    made.stored(labels(prompt, from, to), parent, tokens(prompt, fork(prompt), from, to),
                choices_.once_in(odd_) ? 1 : kBlockSize, medium);
  }

  static uint32_t fork(uint32_t prompt) { return prompt * 50; }
  uint64_t label(uint32_t prompt, uint32_t block) {
    const uint64_t own = block < fork(prompt) ? block : prompt * 1'000 + block;
    if (choices_.once_in(20 * odd_)) return 7 + choices_.below(3);  // of several blocks
    return own + (choices_.once_in(20 * odd_) ? 100'001 : 1);  // a second one of the block
  }
  std::vector<uint64_t> labels(uint32_t prompt, uint32_t from, uint32_t to) {
    std::vector<uint64_t> all;
    for (uint32_t block = from; block < to; ++block) all.push_back(label(prompt, block));
    return all;
  }
  // Make digests of odd labels.
  static void name_labels(Batch& batch) {
    const auto name = [&](WireHash& hash) {
      if (hash.value % 2 == 0) return;
      const std::string text(1 + hash.value % 40, static_cast<char>('a' + hash.value % 26));
      const std::string whole = text + std::to_string(hash.value);
      hash = {batch.bytes.size(), static_cast<uint32_t>(whole.size())};
      batch.bytes.insert(batch.bytes.end(), whole.begin(), whole.end());
    };
    for (WireHash& hash : batch.hashes) name(hash);
    for (Event& event : batch.events) {
      if (event.has_parent) name(event.parent);
    }
  }

  Choices& choices_;
  const bool has_bytes_;
  const uint32_t odd_;
};

RankImage through_bytes(const Index& index, Index::RankId rank) {
  const std::string bytes = write_image(*index.image(rank));
  return read_image(reinterpret_cast<const uint8_t*>(bytes.data()), bytes.size());
}

using Resident = std::vector<std::tuple<uint64_t, std::string, uint32_t, std::string, uint64_t>>;

Resident resident(const Index& index, Index::RankId rank) {
  Resident all;
  const std::vector<ResidentBlock> walked = index.walk(rank).value();
  for (const ResidentBlock& block : walked) {
    all.emplace_back(block.value, block.name, block.depth, block.medium, block.copies);
  }
  std::sort(all.begin(), all.end());
  return all;
}

std::map<uint32_t, std::pair<uint32_t, uint64_t>> answer(const Index& index, uint32_t prompt) {
  const std::vector<uint32_t> asked = tokens(prompt, prompt * 50, 0, kBlocks);
  Answer found;
  index.match(made_query(asked), found);
  std::map<uint32_t, std::pair<uint32_t, uint64_t>> all;
  for (const FoundRank& rank : found.ranks) all[rank.rank] = {rank.blocks(), rank.tokens};
  return all;
}

void expect_equal(const Index& one, const Index& other) {
  one.check();
  other.check();
  EXPECT(one.size() == other.size());
  for (Index::RankId rank = 0; rank < kRanks; ++rank) {
    EXPECT(resident(one, rank) == resident(other, rank));
    const RankStatistics original = *one.statistics(rank);
    const RankStatistics copied = *other.statistics(rank);
    EXPECT(original.counters == copied.counters && original.ignored == copied.ignored);
    EXPECT(original.orphans == copied.orphans && original.duplicates == copied.duplicates);
    EXPECT(original.ambiguous == copied.ambiguous && original.orphans_dropped == copied.orphans_dropped);
  }
  for (uint32_t prompt = 0; prompt < 4; ++prompt) {
    EXPECT(answer(one, prompt) == answer(other, prompt));
  }
}

void restored_indexes_go_on(uint64_t seed) {
  Choices choices(seed);
  const size_t max_orphans = choices.once_in(3) ? 50 : 16'384;
  Index index = made_index(5, std::nullopt, max_orphans);
  Index copy = made_index(5, std::nullopt, max_orphans);
  for (size_t i = 0; i < kRanks; ++i) EXPECT(index.add() == copy.add());
  Story story(choices);
  for (int round = 0; round < 6; ++round) {
    for (int step = 0; step < 25; ++step) {
      const Batch batch = story.next();
      const Index::RankId rank = choices.below(kRanks);
      EXPECT(index.apply(rank, batch));
      EXPECT(copy.apply(rank, batch));
    }
    expect_equal(index, copy);
    copy.apply(choices.below(kRanks), story.next());  // goes its own way, until it is restored
    for (Index::RankId rank = 0; rank < kRanks; ++rank) {
      EXPECT(copy.restore(rank, through_bytes(index, rank)) == rank);
      copy.check();
    }
    expect_equal(index, copy);
  }
  for (Index::RankId rank = 0; rank < kRanks; ++rank) EXPECT(copy.remove(rank));
  const TreeStatistics left = copy.statistics();
  EXPECT(left.blocks == 0 && left.unique_blocks == 0 && left.runs == 0);
}

// Change, cut out, double or put in a few bytes.
void damage(std::string& bytes, Choices& choices) {
  for (uint32_t edits = 1 + choices.below(3); edits != 0; --edits) {
    const size_t at = choices.below(bytes.size());
    switch (choices.below(4)) {
      case 0: bytes[at] = static_cast<char>(choices.word()); break;
      case 1: bytes[at] = static_cast<char>(bytes[at] ^ 1 << choices.below(8)); break;
      case 2: bytes.erase(at, 1 + choices.below(20)); break;
      default: bytes.insert(at, bytes.substr(choices.below(bytes.size()), choices.below(40)));
    }
    if (bytes.empty()) bytes.push_back('x');
  }
}

void hostile_bytes_leave_an_index_whole(uint64_t seed) {
  Choices choices(seed);
  Index index = made_index(5);
  for (size_t i = 0; i < kRanks; ++i) index.add();
  Story story(choices);
  for (int step = 0; step < 20; ++step) index.apply(choices.below(2), story.next());
  const std::string whole = write_image(*index.image(0));
  int restored = 0;
  for (int round = 0; round < 100; ++round) {
    std::string bytes = whole;
    damage(bytes, choices);
    try {
      index.restore(choices.below(kRanks), read_image(
          reinterpret_cast<const uint8_t*>(bytes.data()), bytes.size()));
      ++restored;
    } catch (const ImageError&) {
    }
    index.check();
    for (uint32_t prompt = 0; prompt < 4; ++prompt) answer(index, prompt);
    index.apply(choices.below(kRanks), story.next());
    index.check();
  }
  EXPECT(restored > 5);
  for (Index::RankId rank = 0; rank < kRanks; ++rank) EXPECT(index.remove(rank));
  EXPECT(index.statistics().unique_blocks == 0);
}

bool is_refused(const RankImage& image) {
  const std::string bytes = write_image(image);
  try {
    read_image(reinterpret_cast<const uint8_t*>(bytes.data()), bytes.size());
  } catch (const ImageError&) {
    return true;
  }
  return false;
}

// What would be held of a block that an image has twice would be counted twice.
void no_block_is_in_an_image_twice() {
  Index index = made_index(5);
  const Index::RankId rank = index.add();
  index.apply(rank, MadeBatch().stored({1, 2, 3}, std::nullopt, tokens(0, 9, 0, 3), 2).batch);
  const RankImage whole = through_bytes(index, rank);
  const auto with_chain = [&](uint32_t parent, Key key) {
    RankImage image = whole;
    ChainImage chain = whole.chains[0];
    chain.parent = parent;
    chain.first = image.positions();
    chain.count = 1;
    chain.holdings_end = 2;
    image.chains.push_back(chain);
    image.keys.push_back(key);
    image.holdings.push_back({0, 1});
    image.labels.push_back({9, 0});
    return image;
  };
  EXPECT(!is_refused(whole));
  EXPECT(!is_refused(with_chain(ChainImage::kStart, 77)) && !is_refused(with_chain(0, 77)));
  EXPECT(is_refused(with_chain(ChainImage::kStart, whole.keys[0])));
  EXPECT(is_refused(with_chain(0, whole.keys[1])));
  EXPECT(!is_refused(with_chain(0, whole.keys[2])));
}

void what_has_no_room_changes_nothing() {
  Choices choices(3);
  Index index = made_index(5);
  index.add();
  Story story(choices);
  for (int step = 0; step < 30; ++step) index.apply(0, story.next());
  const RankImage image = through_bytes(index, 0);
  EXPECT(image.resident() == *index.size(0));
  Index small = made_index(5, image.resident() - 1);
  const Index::RankId known = small.add();
  bool refused = false;
  try {
    small.restore(known, image);
  } catch (const NoRoom& error) {
    refused = error.wanted == image.resident() && error.room == image.resident() - 1;
  }
  EXPECT(refused && small.size() == 0);
  small.check();
  Index large = made_index(5, image.resident());
  EXPECT(large.restore(std::nullopt, image) == 0 && large.size() == image.resident());
  large.check();
}

}  // namespace

int main() {
  for (int round = 0; round < rounds(15); ++round) {
    restored_indexes_go_on(static_cast<uint64_t>(round));
    hostile_bytes_leave_an_index_whole(static_cast<uint64_t>(round));
  }
  no_block_is_in_an_image_twice();
  what_has_no_room_changes_nothing();
}

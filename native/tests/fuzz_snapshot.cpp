// libFuzzer target: bytes as the body of a section, restored into an index that holds something.
//
// Whatever they say, every invariant holds afterwards, what was restored can be dumped and restored
// again, events and queries go on, and nothing is left when all is removed. Good seeds: what
// `kvindex.wire._native.Index.dump` returns.
#include <algorithm>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "core/snapshot.hpp"
#include "tests/expect.hpp"
#include "tests/made_batch.hpp"

namespace {

using namespace kvindex;
using namespace kvindex::tests;

constexpr uint32_t kBlockSize = 2;

std::vector<uint32_t> tokens(uint32_t from, uint32_t to) {
  std::vector<uint32_t> all;
  for (uint32_t i = from * kBlockSize; i < to * kBlockSize; ++i) all.push_back(i);
  return all;
}

// Events of an engine that goes on: they meet labels and blocks of the seeds.
std::vector<Batch> later_events() {
  std::vector<Batch> all;
  const auto tell = [&](MadeBatch& made) { all.push_back(std::move(made.batch)); };
  tell(MadeBatch().stored({1, 2, 3}, std::nullopt, tokens(0, 3), kBlockSize));
  tell(MadeBatch().stored({4, 5}, 3, tokens(3, 5), kBlockSize, "CPU"));
  tell(MadeBatch().stored({9, 10}, 8, tokens(8, 10), kBlockSize));
  tell(MadeBatch().stored({77, 2}, std::nullopt, tokens(0, 2), kBlockSize));
  tell(MadeBatch().stored({1, 3}, std::nullopt, {}, 0, "CPU"));
  tell(MadeBatch().removed({1, 2, 77, 5}));
  tell(MadeBatch().removed({4}, "CPU"));
  return all;
}

void ask(const Index& index) {
  const std::vector<uint32_t> prompt = tokens(0, 40);
  Answer answer;
  index.match(made_query(prompt), answer);
  for (const FoundRank& found : answer.ranks) EXPECT(found.tokens <= prompt.size());
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  // Of just this size, so that reading one byte too many is seen.
  const std::unique_ptr<uint8_t[]> body(new uint8_t[size]);
  std::copy(data, data + size, body.get());
  RankImage image;
  try {
    image = read_image(body.get(), size);
  } catch (const ImageError&) {
    return 0;
  }
  Index index = made_index(3);
  const Index::RankId other = index.add();
  const std::vector<Batch> events = later_events();
  for (const Batch& batch : events) index.apply(other, batch);
  Index::RankId rank = 0;
  try {
    rank = index.restore(std::nullopt, image);
  } catch (const ImageError&) {  // more media than an index can have
    return 0;
  }
  index.check();
  EXPECT(index.size(rank) == image.resident());
  ask(index);
  const std::string again = write_image(index.image(rank).value());
  const Index::RankId copy = index.restore(
      std::nullopt, read_image(reinterpret_cast<const uint8_t*>(again.data()), again.size()));
  index.check();
  EXPECT(index.size(copy) == image.resident());
  for (const Batch& batch : events) {
    index.apply(rank, batch);
    index.apply(copy, batch);
    index.check();
    EXPECT(index.size(copy) == index.size(rank));
  }
  ask(index);
  for (const Index::RankId some : {other, rank, copy}) index.remove(some);
  index.check();
  EXPECT(index.statistics().unique_blocks == 0 && index.statistics().runs == 0);
  return 0;
}

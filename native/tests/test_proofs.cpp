// SHA-256 against the examples of FIPS 180-4 and NIST's test vectors; and an index that proves by it
// where blocks of a model of windows belong. tests/index/test_proofs.py has the rest.
#include <algorithm>
#include <array>
#include <numeric>
#include <string>
#include <string_view>
#include <vector>

#include "core/sha256.hpp"
#include "tests/expect.hpp"
#include "tests/made_batch.hpp"

namespace {

using namespace kvindex;
using namespace kvindex::tests;

std::string hex(const Sha256& digest) {
  static constexpr std::string_view kDigits = "0123456789abcdef";
  std::string text;
  for (const uint8_t byte : digest) {
    text += kDigits[byte >> 4];
    text += kDigits[byte & 15];
  }
  return text;
}

// Labels of blocks 0 … 3 of four tokens each: the tokens 0, 1, 2, …
constexpr std::array<uint64_t, 4> kLabels{0x90bbd03ba4a195dd, 0x4fbb0654074b8d43,
                                          0x27d3d9de7bd66f25, 0x86d3b2e8840b59bf};

std::vector<uint32_t> tokens_from(uint32_t start, uint32_t count) {
  std::vector<uint32_t> tokens(count);
  std::iota(tokens.begin(), tokens.end(), start);
  return tokens;
}

void test_blocks_are_placed_where_the_chain_has_their_labels() {
  Index index = made_index(1);
  const Index::RankId rank = index.add();
  index.configure(rank, made_settings(0, "mamba"));
  const auto proofs = [&](Counter counter) {
    return index.statistics(rank)->counters[static_cast<size_t>(counter)];
  };
  index.apply(rank, MadeBatch().stored({kLabels[1]}, std::nullopt, tokens_from(0, 12), 4).batch);
  // From a block that nobody named, and whose step is gone back over.
  index.apply(rank, MadeBatch().stored({kLabels[3]}, kLabels[2], tokens_from(12, 4), 4).batch);
  index.check();
  std::vector<uint32_t> depths;
  const auto held = index.walk(rank);
  for (const ResidentBlock& block : *held) depths.push_back(block.depth);
  std::sort(depths.begin(), depths.end());
  EXPECT((depths == std::vector<uint32_t>{1, 3}));
  EXPECT(proofs(Counter::proofs) == 2 && proofs(Counter::proofs_missed) == 0);
  index.apply(rank, MadeBatch().removed({kLabels[3]}).removed({kLabels[1]}).batch);
  index.check();
  EXPECT(index.statistics().unique_blocks == 0);
  index.apply(rank, MadeBatch().stored({7}, std::nullopt, tokens_from(0, 12), 4).batch);
  EXPECT(proofs(Counter::proofs_missed) == 1 && index.statistics(rank)->orphans == 1);
}

}  // namespace

int main() {
  test_blocks_are_placed_where_the_chain_has_their_labels();
  EXPECT(hex(sha256("")) == "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855");
  EXPECT(hex(sha256("abc")) == "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad");
  EXPECT(hex(sha256("abcdbcdecdefdefgefghfghighijhijkijkljklmklmnlmnomnopnopq")) ==
         "248d6a61d20638b8e5c026930c3e6039a33ce45964ff2167f6ecedd419db06c1");
  EXPECT(hex(sha256("abcdefghbcdefghicdefghijdefghijkefghijklfghijklmghijklmn"
                    "hijklmnoijklmnopjklmnopqklmnopqrlmnopqrsmnopqrstnopqrstu")) ==
         "cf5b16a778af8380036ce59e7b0492370b249b11e8f07a51afac45037afee9d1");
  EXPECT(hex(sha256(std::string(1'000'000, 'a'))) ==
         "cdc76e5c9914fb9281a1c7e284d73e67f1809a48a497200e046d39ccc7112cd0");
}

// The index against an obviously right model: which prefixes each rank holds copies of.
//
// Prompts fork from one another at random places, so that they share long and short beginnings;
// blocks come and go one by one, in chains, with ranks, and all at once.
#include <algorithm>
#include <array>
#include <map>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "tests/expect.hpp"
#include "tests/made_batch.hpp"

namespace {

using namespace kvindex;
using namespace kvindex::tests;

constexpr uint32_t kBlockSize = 2;
constexpr size_t kMostBlocks = 200;  // of a prompt: more than three strands
constexpr std::array<const char*, 2> kMedia{"GPU", "CPU"};

using Node = uint32_t;  // a prefix: the block at its end and everything before it
constexpr Node kStart = 0;

// All prefixes there are, each with a number of its own.
class Prefixes {
 public:
  Node after(Node parent, uint32_t token) {
    const auto [place, is_new] = nodes_.try_emplace({parent, token}, Node(nodes_.size() + 1));
    return place->second;
  }

 private:
  std::map<std::pair<Node, uint32_t>, Node> nodes_;
};

struct Prompt {
  std::vector<uint32_t> tokens;
  std::vector<Node> nodes;
};

uint64_t label_of(Node node) { return node * 0x9e3779b97f4a7c15u; }

// How many copies of each prefix a rank holds on each medium.
using Held = std::map<Node, std::array<uint64_t, 2>>;

class World {
 public:
  explicit World(uint64_t seed)
      : choices_(seed), index_(made_index(seed)), most_ranks_(choices_.once_in(2) ? 3 : 70) {}

  void run(int steps) {
    for (int step = 0; step < steps; ++step) {
      act();
      ask();
      if (choices_.once_in(20)) compare();
    }
    compare();
    drop_everything();
  }

 private:
  using Ranks = std::map<Index::RankId, Held>;

  void act() {
    const uint32_t what = choices_.below(100);
    if (ranks_.empty() || (what < 8 && ranks_.size() < most_ranks_)) {
      ranks_[index_.add()];
    } else if (what < 9) {
      const auto rank = any_rank();
      EXPECT(index_.remove(rank->first));
      EXPECT(!index_.clear(rank->first) && !index_.remove(rank->first));
      ranks_.erase(rank);
    } else if (what < 11) {
      clear(*any_rank(), choices_.once_in(2));
    } else if (what < 65) {
      store(*any_rank());
    } else {
      remove(*any_rank());
    }
  }

  Ranks::iterator any_rank() {
    return std::next(ranks_.begin(), choices_.below(ranks_.size()));
  }

  // A prompt that was there before, or one that forks from such a one somewhere.
  const Prompt& any_prompt() {
    if (!prompts_.empty() && !choices_.once_in(4)) return prompts_[choices_.below(prompts_.size())];
    Prompt prompt;
    if (!prompts_.empty()) {
      prompt = prompts_[choices_.below(prompts_.size())];
      prompt.nodes.resize(choices_.below(prompt.nodes.size() + 1));
    }
    prompt.tokens.resize(prompt.nodes.size() * kBlockSize);
    const size_t length = prompt.nodes.size() + 1 + choices_.below(choices_.once_in(2) ? 5 : 120);
    while (prompt.nodes.size() < std::min(length, kMostBlocks)) {
      const uint32_t token = choices_.below(3);
      const Node before = prompt.nodes.empty() ? kStart : prompt.nodes.back();
      prompt.nodes.push_back(prefixes_.after(before, token));
      prompt.tokens.insert(prompt.tokens.end(), {token, 7});
    }
    if (prompt.nodes.empty()) return any_prompt();
    if (prompts_.size() == 12) prompts_.erase(prompts_.begin() + choices_.below(12));
    return prompts_.emplace_back(std::move(prompt));
  }

  // Store a stretch of a prompt after a block that is held, or a new beginning.
  void store(Ranks::value_type& rank) {
    const Prompt& prompt = any_prompt();
    auto& [id, held] = rank;
    std::vector<size_t> starts;
    if (!held.contains(prompt.nodes[0])) starts.push_back(0);
    for (size_t i = 1; i < prompt.nodes.size(); ++i) {
      if (held.contains(prompt.nodes[i - 1])) starts.push_back(i);
    }
    if (starts.empty()) return;
    const size_t start = starts[choices_.below(starts.size())];
    const size_t most = prompt.nodes.size() - start;
    const size_t count = choices_.once_in(3) ? most : 1 + choices_.below(std::min<size_t>(most, 6));
    const uint32_t medium = choices_.once_in(5);
    std::vector<uint64_t> labels;
    for (size_t i = start; i < start + count; ++i) {
      labels.push_back(label_of(prompt.nodes[i]));
      ++held[prompt.nodes[i]][medium];
    }
    const auto from = prompt.tokens.begin() + static_cast<ptrdiff_t>(start * kBlockSize);
    const auto to = from + static_cast<ptrdiff_t>(count * kBlockSize);
    std::optional<uint64_t> parent;
    if (start != 0) parent = label_of(prompt.nodes[start - 1]);
    MadeBatch made;
    made.stored(labels, parent, {from, to}, kBlockSize, kMedia[medium]);
    EXPECT(index_.apply(id, made.batch));
  }

  // Remove a few blocks anywhere, or a stretch of what is held.
  void remove(Ranks::value_type& rank) {
    auto& [id, held] = rank;
    if (held.empty()) return;
    const uint32_t medium = choices_.once_in(3);
    const size_t count = choices_.once_in(6) ? 60 : 3;
    std::vector<uint64_t> labels;
    for (size_t i = 0; i < count && !held.empty(); ++i) {
      const auto at = std::next(held.begin(), choices_.below(held.size()));
      labels.push_back(label_of(at->first));
      if (at->second[medium] != 0) --at->second[medium];
      if (at->second[0] + at->second[1] == 0) held.erase(at);
    }
    MadeBatch made;
    made.removed(labels, kMedia[medium]);
    EXPECT(index_.apply(id, made.batch));
  }

  void clear(Ranks::value_type& rank, bool by_event) {
    for (auto& [node, copies] : rank.second) copies[0] = 0;
    // An event leaves what a connector holds on the host.
    std::erase_if(rank.second,
                  [&](const auto& held) { return !by_event || held.second[1] == 0; });
    MadeBatch made;
    made.cleared();
    EXPECT(by_event ? index_.apply(rank.first, made.batch) : index_.clear(rank.first));
  }

  // What must be so ------------------------------------------------------------------------

  void ask() {
    const Prompt& prompt = any_prompt();
    Query query = made_query(prompt.tokens);
    const int medium = choices_.once_in(3) ? static_cast<int>(choices_.below(2)) : -1;
    if (medium >= 0) query.media = {kMedia[static_cast<size_t>(medium)]};
    if (choices_.once_in(5)) query.tokens.ready = choices_.below(prompt.tokens.size() + 1);
    Answer answer;
    index_.match(query, answer);
    if (answer.starved) {
      EXPECT(query.tokens.ready < query.tokens.length);
      query.tokens.ready = query.tokens.length;
      index_.match(query, answer);
    }
    std::map<Index::RankId, uint32_t> found;
    uint32_t most = 0;
    for (const FoundRank& rank : answer.ranks) {
      EXPECT(rank.blocks() != 0 && rank.tokens == rank.blocks() * kBlockSize);
      found[rank.rank] = rank.blocks();
      most = std::max(most, rank.blocks());
    }
    EXPECT(found.size() == answer.ranks.size());
    EXPECT((answer.best >= 0) == (most != 0));
    if (most != 0) EXPECT(answer.ranks[static_cast<size_t>(answer.best)].blocks() == most);
    for (const auto& [rank, held] : ranks_) {
      const uint32_t expected = leading(held, prompt, medium);
      EXPECT(found.contains(rank) == (expected != 0));
      if (expected != 0) EXPECT(found[rank] == expected);
    }
  }

  // Blocks from the start that are on one medium; if any will do, on the GPU and then on the CPU.
  static uint32_t leading(const Held& held, const Prompt& prompt, int medium) {
    size_t on = medium >= 0 ? static_cast<size_t>(medium) : 0;
    uint32_t count = 0;
    while (count < prompt.nodes.size()) {
      const auto copies = held.find(prompt.nodes[count]);
      if (copies != held.end() && copies->second[on] != 0) {
        ++count;
      } else if (medium < 0 && on == 0) {
        on = 1;
      } else {
        break;
      }
    }
    return count;
  }

  void compare() {
    index_.check();
    std::set<Node> nodes;
    uint64_t blocks = 0;
    for (const auto& [rank, held] : ranks_) {
      EXPECT(index_.size(rank) == held.size());
      blocks += held.size();
      std::map<std::pair<uint64_t, std::string>, uint64_t> expected;
      for (const auto& [node, copies] : held) {
        nodes.insert(node);
        for (size_t medium = 0; medium < kMedia.size(); ++medium) {
          if (copies[medium] != 0) expected[{label_of(node), kMedia[medium]}] = copies[medium];
        }
      }
      std::map<std::pair<uint64_t, std::string>, uint64_t> found;
      const auto resident = index_.walk(rank);
      EXPECT(resident.has_value());
      for (const ResidentBlock& block : *resident) {
        found[{block.value, block.medium}] = block.copies;
      }
      EXPECT(found == expected);
    }
    const TreeStatistics statistics = index_.statistics();
    EXPECT(statistics.blocks == blocks && index_.size() == blocks);
    EXPECT(statistics.unique_blocks >= nodes.size());  // and what lies before a block held
    EXPECT((statistics.runs != 0) == !nodes.empty());
  }

  void drop_everything() {
    while (!ranks_.empty()) {
      const auto rank = any_rank();
      while (choices_.once_in(2) && !rank->second.empty()) remove(*rank);
      index_.remove(rank->first);
      ranks_.erase(rank);
    }
    compare();
    const TreeStatistics statistics = index_.statistics();
    EXPECT(statistics.unique_blocks == 0 && statistics.runs == 0);
    EXPECT(index_.block_sizes("").empty());
  }

  Choices choices_;
  Index index_;
  const size_t most_ranks_;
  Ranks ranks_;
  Prefixes prefixes_;
  std::vector<Prompt> prompts_;
};

}  // namespace

int main() {
  for (int seed = 0; seed < rounds(40); ++seed) World(static_cast<uint64_t>(seed)).run(600);
}

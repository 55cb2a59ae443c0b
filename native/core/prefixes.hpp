// Who holds which prefixes: the shared tree from its roots on, the most widely held first.
//
// The Python twin, kvindex/index/views.py, says what a node is and in which order they come;
// both give the same nodes in the same order. Nodes are found in pieces, so that nobody waits long
// for the index: what a piece remembers for the next one is looked at anew by it.
#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <queue>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "core/matching.hpp"
#include "core/rank_rows.hpp"

namespace kvindex {

struct PrefixNode {
  int64_t parent = -1;  // its row; -1: none
  uint32_t depth = 0;   // blocks before it
  uint32_t blocks = 0;
  uint32_t name_space = 0;  // in PrefixTree::namespaces
  uint32_t holding = 0;     // in PrefixTree::holdings
  bool salted = false;
  uint64_t children = 0;
  uint64_t left_out = 0;         // of the children
  uint64_t left_out_blocks = 0;  // their own, of those that were looked at
};

// Which rows hold something, on which media.
struct PrefixHolding {
  uint32_t ranks = 0;  // on any medium
  std::vector<std::pair<const std::string*, std::vector<uint8_t>>> rows;  // bitmaps, by name
};

struct PrefixTree {
  std::vector<PrefixNode> nodes;
  std::vector<Namespace> namespaces;
  std::vector<PrefixHolding> holdings;
  PrefixNode root;  // stands for all namespaces: its children begin prompts
  uint64_t looked_at = 0;
  uint64_t unique_blocks = 0;
};

class PrefixWalk {
 public:
  static constexpr uint32_t kLooks = 256;       // at children, for each node that is wanted
  static constexpr uint32_t kMostBlocks = 8192;  // of a node

  // `only_rows`: leave out what none of the rows holds, and what comes after it.
  PrefixWalk(uint64_t max_nodes, uint64_t min_blocks, const RankRows& rows, bool only_rows);

  // Go on for about a thousand strands; false once all is done. Reads the shared state only.
  bool go_on(const Shared& shared, const std::vector<RankSlot>& ranks);

  // What was found, once all is done.
  PrefixTree& found() { return found_; }

 private:
  // A block, and the key by which it is known again.
  struct Known {
    BlockRef block = kNoBlock;
    Key key = 0;
  };

  // A node that may be shown.
  struct Candidate {
    uint32_t ranks = 0;
    uint32_t blocks = 0;
    uint64_t number = 0;  // in the order of looking
    Known end;
    int64_t parent = -1;
    uint32_t depth = 0;
    uint32_t name_space = 0;
    uint32_t holding = 0;
    bool salted = false;

    bool operator<(const Candidate& other) const {
      if (ranks != other.ranks) return ranks < other.ranks;
      if (blocks != other.blocks) return blocks < other.blocks;
      return number > other.number;
    }
  };

  // The children of a node, of which `left` are still to be looked at, from `next` on.
  struct Children {
    Known end;  // of the node; no block: they begin prompts
    RootId root = 0;
    Known next;
    uint64_t left = 0;
    int64_t parent = -1;
    uint32_t depth = 0;
    uint32_t name_space = 0;
  };

  // The blocks of one node, from its first on.
  struct Chain {
    BlockRef end = kNoBlock;
    uint32_t blocks = 0;
    uint32_t holding = 0;
    bool goes_on = false;  // something follows
  };

  PrefixNode& node(int64_t row) { return row < 0 ? found_.root : found_.nodes[static_cast<size_t>(row)]; }
  Known known(BlockRef block) const;
  uint32_t holding(SetId set);
  uint32_t intern(PrefixHolding&& made);
  Chain follow(BlockRef first);
  bool open_namespace();
  void show(const Candidate& shown);
  void open(Children children, uint64_t count);
  void look();

  const uint64_t max_nodes_;
  const uint64_t min_blocks_;
  const RankRows& rows_;
  const bool only_rows_;
  PrefixTree found_;
  std::priority_queue<Candidate> waiting_;
  std::optional<Namespace> last_namespace_;  // whose children have been looked at
  bool all_namespaces_ = false;
  Children children_;
  uint64_t looks_left_;
  std::map<std::string, uint32_t> interned_;  // holdings by their content

  // Of the present piece only.
  const Tree* tree_ = nullptr;
  const Owners* owners_ = nullptr;
  const std::vector<RankSlot>* ranks_ = nullptr;
  std::unordered_map<SetId, uint32_t> holding_of_;
  uint64_t visits_ = 0;
};

}  // namespace kvindex

// What explanations want to know besides matches.
#include <algorithm>
#include <map>
#include <utility>

#include "core/matching.hpp"

namespace kvindex {

std::vector<Holding> find_holdings(const Shared& shared, const std::vector<RankSlot>& ranks,
                                   const Query& query) {
  std::vector<Holding> all;
  std::vector<Key> memory;
  for (const RootId id : shared.tree.roots(query.lora)) {
    const Root& root = shared.tree.root(id);
    if (root.strands == 0) continue;
    if (query.block_size != 0 && root.name.block_size != query.block_size) continue;
    std::map<OwnerId, Spans> held;
    SetId owners = kNoOwners;  // of the blocks from `begin` to `end`
    uint32_t begin = 0;
    uint32_t end = 0;
    const auto note = [&] {
      shared.tree.sets().for_each(owners, [&](OwnerId owner) {
        extend_spans(held[owner], begin, end);
      });
    };
    PromptKeys keys(shared.keys, root, query.tokens, query.extras, memory);
    shared.tree.walk(id, keys, [&](SetId set, uint32_t start, uint32_t stop) {
      if (set != owners) {  // most neighbours have the same ones
        note();
        owners = set;
        begin = start;
      }
      end = stop;
      return true;
    });
    note();
    for (auto& [owner_id, spans] : held) {
      const Owner& owner = shared.owners[owner_id];
      const uint32_t rank = ranks[owner.rank].id;
      if (query.ranks && !std::binary_search(query.ranks->begin(), query.ranks->end(), rank)) {
        continue;
      }
      if (owner.tier != kDeviceTier) {
        spans = ranks[owner.rank].blocks->groups().whole_chunks(std::move(spans), owner.group_idx,
                                                                owner.chunk);
      }
      if (spans.empty()) continue;
      all.push_back({rank, owner.group_idx, *owner.medium, root.name.block_size,
                     root.name.lookahead, std::move(spans)});
    }
  }
  return all;
}

}  // namespace kvindex

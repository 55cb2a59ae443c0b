#include "bindings/prefixes.hpp"

#include "bindings/unicode.hpp"

namespace nb = nanobind;

namespace kvindex {

namespace {

nb::tuple plain(const PrefixNode& node) {
  return nb::make_tuple(node.parent, node.depth, node.blocks, node.name_space, node.holding,
                        node.salted, node.children, node.left_out, node.left_out_blocks);
}

nb::tuple plain(const PrefixHolding& holding) {
  nb::dict rows;
  for (const auto& [medium, bitmap] : holding.rows) {
    rows[unicode(*medium)] = nb::bytes(bitmap.data(), bitmap.size());
  }
  return nb::make_tuple(holding.ranks, rows);
}

}  // namespace

nb::tuple prefixes(const PyIndex& self, uint64_t max_nodes, uint64_t min_blocks,
                   const std::vector<std::optional<uint32_t>>& rows, bool only_rows) {
  const RankRows numbered(rows);
  const PrefixTree found = [&] {
    const GilReleased released;
    return self.index.prefixes(max_nodes, min_blocks, numbered, only_rows);
  }();
  nb::list nodes;
  nb::dict holdings;  // those of nodes: others were only looked at
  for (const PrefixNode& node : found.nodes) {
    nodes.append(plain(node));
    const nb::int_ number(node.holding);
    if (!holdings.contains(number)) holdings[number] = plain(found.holdings[node.holding]);
  }
  nb::list namespaces;
  for (const Namespace& name : found.namespaces) {
    namespaces.append(nb::make_tuple(name.block_size, name.lookahead,
                                     nb::bytes(name.lora.data(), name.lora.size())));
  }
  return nb::make_tuple(nodes, namespaces, holdings, plain(found.root), found.looked_at,
                        found.unique_blocks);
}

}  // namespace kvindex

// Who holds which prefixes, as Python takes it.
#pragma once

#include <nanobind/nanobind.h>

#include <cstdint>
#include <optional>
#include <vector>

#include "bindings/py_index.hpp"

namespace kvindex {

// (nodes, namespaces, holdings, root, looked at, unique blocks); kvindex/index/native.py names them.
nanobind::tuple prefixes(const PyIndex& self, uint64_t max_nodes, uint64_t min_blocks,
                         const std::vector<std::optional<uint32_t>>& rows, bool only_rows);

}  // namespace kvindex

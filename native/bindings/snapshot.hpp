// Ranks of an index to bytes and back, for kvindex/index/native.py.
#pragma once

#include <nanobind/nanobind.h>

#include "bindings/py_index.hpp"

namespace kvindex {

void bind_snapshots(nanobind::class_<PyIndex>& index);

}  // namespace kvindex

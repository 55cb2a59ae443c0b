#pragma once

#include "bindings/py_index.hpp"

namespace kvindex {

void bind_entries(nanobind::class_<PyIndex>& index);

}  // namespace kvindex

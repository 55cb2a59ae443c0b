#pragma once

#include <nanobind/nanobind.h>

namespace kvindex {

void bind_queries(nanobind::module_& module);

}  // namespace kvindex

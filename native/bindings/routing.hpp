#pragma once

#include <nanobind/nanobind.h>

namespace kvindex {

void bind_routing(nanobind::module_& module);

}  // namespace kvindex

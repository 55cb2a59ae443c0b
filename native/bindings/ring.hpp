// The ring's two parties as Python holds them.
#pragma once

#include <nanobind/nanobind.h>

namespace kvindex {

void bind_ring(nanobind::module_& module);

}  // namespace kvindex

// What kvindex.routing counts with: the cost of each rank, and the cheapest.
#include "bindings/routing.hpp"

#include "bindings/columns.hpp"
#include "core/choosing.hpp"

namespace nb = nanobind;
using namespace nb::literals;

namespace kvindex {

namespace {

nb::handle item(const nb::tuple& of, size_t i) {
  return PyTuple_GET_ITEM(of.ptr(), static_cast<Py_ssize_t>(i));
}

void require_items(const nb::tuple& of, size_t least, const char* message) {
  if (nb::len(of) < least) throw nb::value_error(message);
}

double real(nb::handle number) {
  const double value = PyFloat_AsDouble(number.ptr());
  if (value == -1.0 && PyErr_Occurred() != nullptr) throw nb::python_error();
  return value;
}

Weights read_weights(const nb::tuple& given) {
  require_items(given, 10, "weights has 10 values");
  return {.device = real(item(given, 0)),
          .host = real(item(given, 1)),
          .storage = real(item(given, 2)),
          .fresh = real(item(given, 3)),
          .queued = real(item(given, 4)),
          .request = real(item(given, 5)),
          .backlog = real(item(given, 6)),
          .churn = real(item(given, 7)),
          .keep = real(item(given, 8)),
          .full = real(item(given, 9))};
}

// (row, attainable); the costs are written into a column.
nb::tuple choose_row(int64_t prompt_tokens, const nb::tuple& hits, const nb::tuple& loads,
                     nb::handle usable, const nb::tuple& weights, double chance, nb::handle costs) {
  const size_t rows = nb::len(usable);
  require_items(hits, 3, "hits has 3 columns: device, host, tokens");
  require_items(loads, 6, "loads has 6 columns: queued, open, decode, given, contexts, cache");
  if (!(chance >= 0.0 && chance < 1.0)) throw nb::value_error("chance must be in [0, 1)");
  const Mask mask(usable, "usable", rows);
  const Column<const int64_t> device(item(hits, 0), "hits.device", rows);
  const Column<const int64_t> host(item(hits, 1), "hits.host", rows);
  const Column<const int64_t> tokens(item(hits, 2), "hits.tokens", rows);
  const Column<const double> queued(item(loads, 0), "loads.queued", rows);
  const Column<const double> open(item(loads, 1), "loads.open", rows);
  const Column<const double> given(item(loads, 3), "loads.given", rows);
  const Column<const double> contexts(item(loads, 4), "loads.contexts", rows);
  const Column<const double> cache(item(loads, 5), "loads.cache", rows);
  const Column<double> written(costs, "costs", rows);
  const ChoiceColumns columns{rows,         device.data(),   host.data(), tokens.data(),
                              queued.data(), open.data(),     given.data(), contexts.data(),
                              cache.data(), mask.data()};
  const Chosen chosen =
      choose(prompt_tokens, columns, read_weights(weights), chance, written.data());
  return nb::make_tuple(chosen.row, chosen.attainable);
}

}  // namespace

void bind_routing(nb::module_& module) {
  module.def("choose", &choose_row, "prompt_tokens"_a, "hits"_a, "loads"_a, "usable"_a, "weights"_a,
             "chance"_a, "costs"_a);
}

}  // namespace kvindex

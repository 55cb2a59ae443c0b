// What kvindex.queries reads and writes: a query's JSON, and an answer's.
#include "bindings/queries.hpp"

#include <cstring>

#include "bindings/py_index.hpp"
#include "core/query_reader.hpp"

namespace nb = nanobind;
using namespace nb::literals;

namespace kvindex {

namespace {

// Bytes of a body from which on it is worth a hand-over of the GIL: some 100 µs of work.
constexpr size_t kLongBody = size_t{256} << 10;
constexpr size_t kMostKept = size_t{1} << 20;  // tokens of a thread's query between bodies

nb::object new_bytes(size_t size) {
  PyObject* const made = PyBytes_FromStringAndSize(nullptr, static_cast<Py_ssize_t>(size));
  if (made == nullptr) throw nb::python_error();
  return nb::steal(made);
}

nb::object tokens_of(const QueryBody& query) {
  if (!query.has_tokens) return nb::none();
  return nb::bytes(query.tokens.data(), query.tokens.size() * sizeof(uint32_t));
}

nb::object rest_of(const QueryBody& query, nb::handle body, const SimpleBuffer& buffer) {
  if (!query.has_tokens && PyBytes_CheckExact(body.ptr())) return nb::borrow(body);
  nb::object rest = new_bytes(buffer.size() - (query.cut_end - query.cut_begin));
  char* const at = PyBytes_AS_STRING(rest.ptr());
  if (query.cut_begin != 0) std::memcpy(at, buffer.data(), query.cut_begin);
  if (query.cut_end != buffer.size()) {
    std::memcpy(at + query.cut_begin, buffer.data() + query.cut_end, buffer.size() - query.cut_end);
  }
  return rest;
}

// (tokens, rest) of a body, or (fault, at, index).
nb::tuple read_body(nb::handle body, size_t max_tokens) {
  const SimpleBuffer buffer(body);
  if (!buffer.open()) throw nb::type_error("a body is bytes, a bytearray or a memoryview");
  thread_local QueryBody query;
  if (buffer.size() < kLongBody) {
    read_query(buffer.data(), buffer.size(), max_tokens, query);
  } else {
    const GilReleased released;
    read_query(buffer.data(), buffer.size(), max_tokens, query);
  }
  const nb::tuple told = query.fault == QueryFault::none
                             ? nb::make_tuple(tokens_of(query), rest_of(query, body, buffer))
                             : nb::make_tuple(static_cast<int>(query.fault), query.at, query.index);
  if (query.tokens.capacity() > kMostKept) query.tokens = {};
  return told;
}

}  // namespace

void bind_queries(nb::module_& module) {
  module.def("read_query", &read_body, "body"_a.none(), "max_tokens"_a);
}

}  // namespace kvindex

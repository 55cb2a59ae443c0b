// What kvindex.service.queries reads and writes: a query's JSON, and an answer's.
#include "bindings/queries.hpp"

#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <cstring>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "bindings/columns.hpp"
#include "bindings/py_index.hpp"
#include "core/answer_writer.hpp"
#include "core/query_reader.hpp"

namespace nb = nanobind;
using namespace nb::literals;

namespace kvindex {

namespace {

// Bytes of a body from which on it is worth a hand-over of the GIL: some 100 µs of work.
constexpr size_t kLongBody = size_t{256} << 10;
// Tokens that a thread keeps room for between bodies, and bytes between answers.
constexpr size_t kMostTokens = size_t{1} << 20;
constexpr size_t kMostPage = size_t{8} << 20;

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

// (tokens, rest) of a body, or (fault, at, index). A new tuple may start a collection of garbage,
// and that code which reads another body: nothing of `query` is looked at from then on.
nb::tuple fields_of(const QueryBody& query, nb::handle body, const SimpleBuffer& buffer) {
  if (query.fault == QueryFault::none) {
    const nb::object tokens = tokens_of(query);
    const nb::object rest = rest_of(query, body, buffer);
    return nb::make_tuple(tokens, rest);
  }
  const auto fault = static_cast<int>(query.fault);
  const size_t at = query.at;
  const size_t index = query.index;
  return nb::make_tuple(fault, at, index);
}

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
  const nb::tuple fields = fields_of(query, body, buffer);
  if (query.tokens.capacity() > kMostTokens) query.tokens = {};
  return fields;
}

using NamedRanks = std::pair<std::string, std::vector<std::string>>;  // JSON, in UTF-8

void make_writer(AnswerWriter* self, int dialect, const std::string& tenant,
                 std::vector<NamedRanks> instances) {
  std::vector<AnswerWriter::Instance> named;
  for (NamedRanks& instance : instances) {
    named.push_back({std::move(instance.first), std::move(instance.second)});
  }
  new (self) AnswerWriter(static_cast<AnswerDialect>(dialect), tenant, named);
}

// What is to be added to each instance, and how many bytes that is in all; empty: nothing.
std::vector<std::string_view> added_texts(nb::handle trusts, size_t instances, size_t& size) {
  std::vector<std::string_view> texts;
  if (trusts.is_none()) return texts;
  if (!PyTuple_Check(trusts.ptr()) || nb::len(trusts) != instances) {
    throw nb::value_error("trusts must be a tuple with a text for each instance");
  }
  texts.reserve(instances);
  for (size_t i = 0; i < instances; ++i) {
    PyObject* const text = PyTuple_GET_ITEM(trusts.ptr(), static_cast<Py_ssize_t>(i));
    if (!PyBytes_Check(text)) throw nb::type_error("trusts must be a tuple of bytes");
    texts.emplace_back(PyBytes_AS_STRING(text), static_cast<size_t>(PyBytes_GET_SIZE(text)));
    size += texts.back().size();
  }
  return texts;
}

nb::bytes write_answer(const AnswerWriter& self, nb::handle device, nb::handle host,
                       nb::handle tokens, nb::handle trusts) {
  const size_t rows = self.rows();
  const Column<const int64_t> devices(device, "device", rows);
  const Column<const int64_t> hosts(host, "host", rows);
  const Column<const int64_t> all(tokens, "tokens", rows);
  size_t most = self.most();
  const std::vector<std::string_view> added = added_texts(trusts, self.instances(), most);
  thread_local std::vector<char> page;
  if (page.size() < most) page.resize(most);
  const char* const end = self.write({devices.data(), hosts.data(), all.data()},
                                     trusts.is_none() ? nullptr : added.data(), page.data());
  const nb::bytes written(page.data(), static_cast<size_t>(end - page.data()));
  if (page.capacity() > kMostPage) page = {};
  return written;
}

}  // namespace

void bind_queries(nb::module_& module) {
  nb::class_<AnswerWriter>(module, "AnswerWriter")
      .def("__init__", &make_writer, "dialect"_a, "tenant"_a, "instances"_a)
      .def("write", &write_answer, "device"_a, "host"_a, "tokens"_a,
           "trusts"_a.none());
  module.def("read_query", &read_body, "body"_a.none(), "max_tokens"_a);
}

}  // namespace kvindex

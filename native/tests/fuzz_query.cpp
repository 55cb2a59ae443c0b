// libFuzzer target: whatever a body is, `read_query` reads nothing outside it, and what it leaves
// out is a member token_ids with as many numbers as there are tokens.
//
// Built with clang and -fsanitize=fuzzer,address,undefined; its corpus is any bodies of queries.
#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <memory>

#include "core/query_reader.hpp"

namespace {

void require(bool holds) {
  if (!holds) std::abort();
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  static kvindex::QueryBody query;  // reused, as by a server's thread
  // Of just this size, so that reading one byte too many is seen.
  const std::unique_ptr<uint8_t[]> body(new uint8_t[size]);
  if (size != 0) std::memcpy(body.get(), data, size);
  const size_t most = size % 7 == 0 ? 3 : SIZE_MAX;
  kvindex::read_query(body.get(), size, most, query);
  require(query.at <= size && query.tokens.size() <= most && query.tokens.size() <= size / 2);
  if (query.fault != kvindex::QueryFault::none) return 0;
  require(query.cut_begin <= query.cut_end && query.cut_end <= size);
  require((query.cut_begin == query.cut_end) == !query.has_tokens);
  const uint8_t* const cut = body.get() + query.cut_begin;
  const uint8_t* const cut_end = body.get() + query.cut_end;
  const auto opened = std::find(cut, cut_end, '[');
  const auto closed = std::find(opened, cut_end, ']');
  require(query.has_tokens ? opened != cut_end && closed != cut_end : query.tokens.empty());
  const auto commas = static_cast<size_t>(std::count(opened, closed, ','));
  require(query.tokens.empty() ? commas == 0 : query.tokens.size() == commas + 1);
  return 0;
}

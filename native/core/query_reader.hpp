// A query's JSON to its tokens, in one pass, with no object for each of them.
//
// Only the member "token_ids" of the outermost object is read here. The rest is handed on as bytes,
// without that member, to whoever knows its other fields, and is passed over lightly: names,
// strings and brackets are followed, values are not judged. That is enough. If the rest is valid
// JSON, then the light pass has seen its structure rightly, so the member was cut out between two
// others, where a whole object had it. A body that is no JSON thus leaves a rest that is none.
//
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace kvindex {

// Values that lie deeper are refused, so that whoever decodes the rest may go down with its levels.
inline constexpr size_t kMaxQueryDepth = 100;

// kvindex/service/queries.py has the same numbers.
enum class QueryFault : uint8_t {
  none,
  no_object,  // the first value is something else
  syntax,     // no JSON
  no_array,   // token_ids is something else
  bad_token,  // or no JSON from there on: kvindex/service/queries.py tells which
  repeated,   // a second token_ids
  too_many,   // tokens
  too_deep,
  no_text,    // no UTF-8
};

struct QueryBody {
  QueryFault fault = QueryFault::none;
  size_t at = 0;            // the byte where the fault lies
  size_t index = 0;         // how many tokens were read before it
  bool has_tokens = false;  // whether there is a member token_ids
  std::vector<uint32_t> tokens;
  size_t cut_begin = 0;     // the bytes to leave out: the rest is an object without token_ids
  size_t cut_end = 0;
};

// Read a body, or find its first fault. What `query` held before is lost, its memory is used again:
// never more than 4 bytes for every 2 of the body, and a vector's room to grow.
void read_query(const uint8_t* data, size_t size, size_t max_tokens, QueryBody& query);

}  // namespace kvindex

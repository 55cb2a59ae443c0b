// Queries' JSON: what is read of it, what is left, and where it is refused.
#include <cstdint>
#include <limits>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "core/query_reader.hpp"
#include "tests/expect.hpp"

namespace {

using namespace kvindex;
using namespace kvindex::tests;

constexpr size_t kAny = std::numeric_limits<size_t>::max();

// Of a copy that ends where the text does, so that sanitizers see one byte too many.
QueryBody read(std::string_view text, size_t max_tokens = kAny) {
  const std::unique_ptr<uint8_t[]> body(new uint8_t[text.size()]);
  for (size_t i = 0; i < text.size(); ++i) body[i] = static_cast<uint8_t>(text[i]);
  QueryBody query;
  read_query(body.get(), text.size(), max_tokens, query);
  return query;
}

std::string rest(std::string_view text) {
  const QueryBody query = read(text);
  EXPECT(query.fault == QueryFault::none);
  return std::string(text.substr(0, query.cut_begin)).append(text.substr(query.cut_end));
}

void expect_fault(std::string_view text, QueryFault fault, size_t at, size_t index = 0) {
  const QueryBody query = read(text);
  EXPECT(query.fault == fault && query.at == at && query.index == index);
}

void test_the_rest_is_the_object_without_its_tokens() {
  EXPECT(rest(R"({"token_ids":[1,2]})") == "{}");
  EXPECT(rest(R"({"token_ids":[1,2],"a":1})") == R"({"a":1})");
  EXPECT(rest(R"({"a":1,"token_ids":[1,2]})") == R"({"a":1})");
  EXPECT(rest(R"({"a":{"token_ids":["x"]} , "token_ids": [ ] , "b":"]}\""} )") ==
         R"({"a":{"token_ids":["x"]} ,  "b":"]}\""} )");
  EXPECT(rest(R"({"\u0074oken\u005Fids":[1],"b":[]})") == R"({"b":[]})");
  EXPECT(rest(R"({"token_idsx":1})") == R"({"token_idsx":1})");
  EXPECT(!read(R"({"token_id":[1]})").has_tokens);
}

void test_faults_are_found_where_they_are() {
  expect_fault("", QueryFault::no_object, 0);
  expect_fault(" [1]", QueryFault::no_object, 1);
  expect_fault("{", QueryFault::syntax, 1);
  expect_fault("{} x", QueryFault::syntax, 3);
  expect_fault(R"({"a":1,})", QueryFault::syntax, 7);
  expect_fault(R"({"a":"\")", QueryFault::syntax, 8);
  expect_fault("{\"a\":\"\xff\"}", QueryFault::no_text, 9);
  expect_fault(R"({"token_ids":{}})", QueryFault::no_array, 13);
  expect_fault(R"({"token_ids":[1],"token_id\u0073":[2]})", QueryFault::repeated, 17, 1);
  for (const char* const bad : {"-1", "1.0", "1e3", "4294967296", "99999999999999999999", "01", "null",
                                "\"1\"", "-0", "+1", "]", ",", "NaN", "1x", "[1]"}) {
    const std::string text = std::string("{\"token_ids\":[7, ") + bad + " ,8,9,10,11,12,13,14]}";
    expect_fault(text, QueryFault::bad_token, 17, 1);
  }
  expect_fault(R"({"token_ids":[1 2]})", QueryFault::syntax, 16, 1);
}

void test_depth_is_bounded() {
  const auto nested = [](size_t depth) {
    return "{\"a\":" + std::string(depth, '[') + std::string(depth, ']') + "}";
  };
  EXPECT(read(nested(kMaxQueryDepth)).fault == QueryFault::none);
  expect_fault(nested(kMaxQueryDepth + 1), QueryFault::too_deep, 5 + kMaxQueryDepth);
  EXPECT(read(nested(1'000'000)).fault == QueryFault::too_deep);
}

std::string spaces(Choices& choices) {
  std::string text;
  while (choices.once_in(4)) text.push_back(" \n\r\t"[choices.below(4)]);
  return text;
}

// Any numbers in any spacing are read as they are, and one more than allowed is refused.
void test_tokens_are_read(Choices& choices) {
  std::vector<uint32_t> tokens(choices.below(60));
  const bool is_spaced = choices.once_in(2);
  std::string text = "{\"token_ids\":[";
  for (size_t i = 0; i < tokens.size(); ++i) {
    tokens[i] = static_cast<uint32_t>(choices.word() >> (32 + choices.below(32)));
    if (choices.once_in(20)) tokens[i] = UINT32_MAX;
    if (i != 0) text += ",";
    if (is_spaced) text += spaces(choices);
    text += std::to_string(tokens[i]);
    if (is_spaced) text += spaces(choices);
  }
  text += "]}";
  EXPECT(read(text).tokens == tokens && rest(text) == "{}");
  EXPECT(read(text, tokens.size()).fault == QueryFault::none);
  if (!tokens.empty()) {
    const QueryBody query = read(text, tokens.size() - 1);
    EXPECT(query.fault == QueryFault::too_many && query.index == tokens.size() - 1);
  }
  for (size_t size = 0; size < text.size(); ++size) {  // however it is cut off
    EXPECT(read(std::string_view(text).substr(0, size)).fault != QueryFault::none);
  }
}

// Whatever the bytes are, nothing outside them is read, and what is cut out lies within them.
void test_any_bytes(Choices& choices) {
  static constexpr std::string_view kPieces[] = {
      "{", "}", "[", "]", ",", ":", "\"", "\\", "\\u00", " ", "1", "0", "-", ".", "e", "\"token_ids\"",
      "\"a\"", "\xff", "\xc3\xa9", "1234567,", "12345678,", "null", "{\"token_ids\":["};
  std::string text = choices.once_in(2) ? "{\"token_ids\":[" : "{";
  for (uint32_t n = choices.below(30); n != 0; --n) text += kPieces[choices.below(std::size(kPieces))];
  const QueryBody query = read(text, choices.once_in(4) ? 2 : kAny);
  EXPECT(query.at <= text.size() && query.cut_begin <= query.cut_end);
  EXPECT(query.cut_end <= text.size() && query.tokens.size() <= text.size() / 2);
}

}  // namespace

int main() {
  test_the_rest_is_the_object_without_its_tokens();
  test_faults_are_found_where_they_are();
  test_depth_is_bounded();
  for (int seed = 0; seed < rounds(1000); ++seed) {
    Choices choices(static_cast<uint64_t>(seed));
    test_tokens_are_read(choices);
    test_any_bytes(choices);
  }
}

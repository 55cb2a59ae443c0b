// Queries' JSON: what is read, what is left, and where it is refused. And the JSON of answers.
#include <algorithm>
#include <cstdint>
#include <limits>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "core/answer_writer.hpp"
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
  for (const char* const bad : {"-1", "1.0", "1e3", "4294967296", "99999999999999999999", "01",
                                "null", "\"1\"", "-0", "+1", "]", ",", "NaN", "1x", "[1]"}) {
    const std::string text = std::string("{\"token_ids\":[7, ") + bad + " ,8,9,10,11,12,13,14]}";
    expect_fault(text, QueryFault::bad_token, 17, 1);
  }
  expect_fault(R"({"token_ids":[1 2]})", QueryFault::syntax, 16, 1);
}

// A wrong byte anywhere in a long row of tokens is found, where it is.
void test_a_wrong_byte_among_many() {
  std::string text = "{\"token_ids\":[";
  for (uint32_t i = 0; i < 60; ++i) text += std::to_string(i * i * i) + ",";
  text += "7]}";
  EXPECT(read(text).tokens.size() == 61);
  for (const char wrong : {'x', '.', '-', '/', ':', '\0', '\x80', '\xff', '"', '[', '}', '\v'}) {
    for (size_t at = 14; at < text.size() - 2; ++at) {
      std::string broken = text;
      broken[at] = wrong;
      const QueryBody query = read(broken);
      EXPECT(query.fault == QueryFault::bad_token && query.at <= at && at <= query.at + 6);
      const std::string before = text.substr(0, query.at);
      EXPECT(query.index == static_cast<size_t>(std::count(before.begin(), before.end(), ',')));
    }
  }
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
  std::vector<uint32_t> tokens(choices.below(200));
  const bool is_spaced = choices.once_in(2);
  const uint32_t bits[] = {choices.below(32), choices.below(32)};
  std::string text = "{\"token_ids\":[";
  for (size_t i = 0; i < tokens.size(); ++i) {
    tokens[i] = static_cast<uint32_t>(choices.word() >> (32 + bits[choices.below(2)]));
    if (choices.once_in(50)) tokens[i] = UINT32_MAX;
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
  for (int i = 0; i < 20; ++i) {  // however it is cut off
    const size_t size = choices.below(text.size());
    EXPECT(read(std::string_view(text).substr(0, size)).fault != QueryFault::none);
  }
}

// Whatever the bytes are, nothing outside them is read, and what is cut out lies within them.
void test_any_bytes(Choices& choices) {
  static constexpr std::string_view kPieces[] = {
      "{", "}", "[", "]", ",", ":", "\"", "\\", "\\u00", " ", "1", "0", "-", ".", "e",
      "\"token_ids\"", "\"a\"", "\xff", "\xc3\xa9", "1234567,", "12345678,", "null", "{\"token_ids\":["};
  std::string text = choices.once_in(2) ? "{\"token_ids\":[" : "{";
  for (uint32_t n = choices.below(30); n != 0; --n) {
    text += kPieces[choices.below(std::size(kPieces))];
  }
  const QueryBody query = read(text, choices.once_in(4) ? 2 : kAny);
  EXPECT(query.at <= text.size() && query.cut_begin <= query.cut_end);
  EXPECT(query.cut_end <= text.size() && query.tokens.size() <= text.size() / 2);
}

struct Held {
  explicit Held(size_t rows) : device(rows), host(rows), tokens(rows) {}

  AnswerColumns view() const { return {device.data(), host.data(), tokens.data()}; }

  std::vector<int64_t> device, host, tokens;
};

// Written into just as much memory as the writer asks for.
std::string write(const AnswerWriter& writer, const Held& held,
                  const std::vector<std::string_view>& trusts = {}) {
  size_t most = writer.most();
  for (const std::string_view trust : trusts) most += trust.size();
  const std::unique_ptr<char[]> page(new char[most]);
  const char* const end =
      writer.write(held.view(), trusts.empty() ? nullptr : trusts.data(), page.get());
  return {page.get(), static_cast<size_t>(end - page.get())};
}

void test_answers_in_each_dialect() {
  const std::vector<AnswerWriter::Instance> instances = {
      {"\"1\"", {"\"0\"", "\"1\""}}, {"\"none\"", {}}, {"\"2\"", {"\"0\""}}, {"\"3\"", {"\"7\""}}};
  Held held(4);
  held.device = {32, 0, 0, 0};
  held.host = {32, 48, 0, 0};
  held.tokens = {64, 48, 0, 16};
  const std::vector<std::string_view> trusts = {",\"t\":1", ",\"t\":2", ",\"t\":3", ""};
  EXPECT(write(AnswerWriter(AnswerDialect::dynamo, "", instances), held, trusts) ==
         R"({"scores":{"1":{"0":32}},"frequencies":[],"instances":{)"
         R"("1":{"longest_matched":64,"gpu":32,"dp":{"0":32,"1":0},"cpu":48,"disk":64,"t":1},)"
         R"("3":{"longest_matched":16,"gpu":0,"dp":{"7":0},"cpu":0,"disk":16}}})");
  EXPECT(write(AnswerWriter(AnswerDialect::rfc, "\"x\"", instances), held, trusts) ==
         R"({"x":{"1":{"longest_matched":64,"GPU":32,"DP":{"0":64,"1":48},)"
         R"("CPU":48,"DISK":64,"t":1},)"
         R"("3":{"longest_matched":16,"GPU":0,"DP":{"7":16},"CPU":0,"DISK":16}}})");
  EXPECT(write(AnswerWriter(AnswerDialect::rfc, "\"x\"", instances), Held(4)) == R"({"x":{}})");
  EXPECT(write(AnswerWriter(AnswerDialect::dynamo, "", {}), Held(0)) ==
         R"({"scores":{},"frequencies":[],"instances":{}})");
}

// However long names and numbers are, an answer takes no more than was said, and is balanced.
void test_answers_of_any_size(Choices& choices) {
  std::vector<AnswerWriter::Instance> instances(choices.below(6));
  size_t rows = 0;
  const auto name = [&] { return '"' + std::string(choices.below(80), 'n') + '"'; };
  for (AnswerWriter::Instance& instance : instances) {
    instance.name = name();
    instance.ranks.resize(choices.below(4));
    for (std::string& rank : instance.ranks) rank = name();
    rows += instance.ranks.size();
  }
  Held held(rows);
  for (std::vector<int64_t>* column : {&held.device, &held.host, &held.tokens}) {
    for (int64_t& value : *column) {
      value = choices.once_in(3) ? std::numeric_limits<int64_t>::max() : choices.below(3);
      if (choices.once_in(9)) value = std::numeric_limits<int64_t>::min();
    }
  }
  const auto dialect = static_cast<AnswerDialect>(choices.below(2));
  const std::string text = write(AnswerWriter(dialect, name(), instances), held);
  EXPECT(std::count(text.begin(), text.end(), '{') == std::count(text.begin(), text.end(), '}'));
  EXPECT(std::count(text.begin(), text.end(), '"') % 2 == 0);
}

}  // namespace

int main() {
  test_answers_in_each_dialect();
  test_the_rest_is_the_object_without_its_tokens();
  test_faults_are_found_where_they_are();
  test_a_wrong_byte_among_many();
  test_depth_is_bounded();
  for (int seed = 0; seed < rounds(1000); ++seed) {
    Choices choices(static_cast<uint64_t>(seed));
    test_tokens_are_read(choices);
    test_any_bytes(choices);
    test_answers_of_any_size(choices);
  }
}

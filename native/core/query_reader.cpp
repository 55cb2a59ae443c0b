#include "core/query_reader.hpp"

#include <bit>
#include <cstring>
#include <iterator>
#include <string_view>

#include "core/utf8.hpp"

namespace kvindex {
namespace {

constexpr std::string_view kTokens = "token_ids";

bool is_space(uint8_t byte) {
  return byte == ' ' || byte == '\n' || byte == '\r' || byte == '\t';
}

bool is_digit(uint8_t byte) { return byte >= '0' && byte <= '9'; }

// The value of eight digits, each a byte of 0 to 9, the first one in the lowest byte.
uint64_t eight_digits(uint64_t digits) {
  digits = (digits * 10 + (digits >> 8)) & 0x00ff00ff00ff00ffu;
  digits = (digits * 100 + (digits >> 16)) & 0x0000ffff0000ffffu;
  return (digits * 10'000 + (digits >> 32)) & 0xffffffffu;
}

constexpr size_t kBlock = 64;

// A bit for each byte of a block that is a comma.
uint64_t commas_of(const uint8_t* block) {
  uint64_t bits = 0;
  for (size_t at = 0; at < kBlock; at += 8) {
    uint64_t bytes;
    std::memcpy(&bytes, block + at, sizeof bytes);
    bytes ^= 0x2c2c2c2c2c2c2c2cu;  // a comma becomes zero
    const uint64_t low = 0x7f7f7f7f7f7f7f7fu;
    const uint64_t high = ~(((bytes & low) + low) | bytes | low);  // the high bit of each zero
    bits |= (((high >> 7) * 0x0102040810204080u) >> 56) << at;     // the eight of them side by side
  }
  return bits;
}

class QueryReader {
 public:
  QueryReader(const uint8_t* data, size_t size, size_t max_tokens, QueryBody& query)
      : begin_(data), end_(data + size), at_(data), max_tokens_(max_tokens), query_(query) {}

  // Read the whole body; false if it has a fault.
  bool read() {
    skip_space();
    if (!take('{')) return fail(QueryFault::no_object);
    skip_space();
    if (!take('}') && !members()) return false;
    skip_space();
    if (at_ != end_) return fail(QueryFault::syntax);
    return is_text() || fail(QueryFault::no_text);
  }

 private:
  bool fail(QueryFault fault) { return fail(fault, at_); }
  bool fail(QueryFault fault, const uint8_t* where) {
    query_.fault = fault;
    query_.at = offset(where);
    query_.index = query_.tokens.size();
    return false;
  }

  size_t offset(const uint8_t* where) const { return static_cast<size_t>(where - begin_); }
  bool sees(char wanted) const { return at_ != end_ && *at_ == static_cast<uint8_t>(wanted); }
  bool take(char wanted) {
    if (!sees(wanted)) return false;
    ++at_;
    return true;
  }
  void skip_space() {
    while (at_ != end_ && is_space(*at_)) ++at_;
  }

  // The members of the outermost object, its closing bracket included.
  bool members() {
    const uint8_t* comma = nullptr;  // before the member
    for (;;) {
      const uint8_t* const name = at_;
      bool is_tokens = false;
      if (!read_name(is_tokens)) return false;
      if (is_tokens && query_.has_tokens) return fail(QueryFault::repeated, name);
      skip_space();
      if (!take(':')) return fail(QueryFault::syntax);
      skip_space();
      if (!(is_tokens ? read_tokens() : skip_value())) return false;
      const uint8_t* const value_end = at_;
      skip_space();
      if (is_tokens) cut(name, comma, value_end);
      comma = at_;
      if (take('}')) return true;
      if (!take(',')) return fail(QueryFault::syntax);
      skip_space();
    }
  }

  // Cut a member with the comma after it, or with the one before it if it is the last.
  void cut(const uint8_t* name, const uint8_t* comma, const uint8_t* value_end) {
    const bool is_last = !sees(',');
    query_.cut_begin = offset(is_last && comma != nullptr ? comma : name);
    query_.cut_end = is_last ? offset(value_end) : offset(at_) + 1;
  }

  bool read_name(bool& is_tokens) {
    if (!sees('"')) return fail(QueryFault::syntax);
    const uint8_t* const first = at_ + 1;
    if (!skip_string()) return false;
    is_tokens = names_tokens(first, at_ - 1);
    return true;
  }

  // Whether a name, as it stands between its quotes, is token_ids. Any of the letters may be
  // escaped, and can be in one way only: as \u and four hexadecimal digits.
  static bool names_tokens(const uint8_t* at, const uint8_t* end) {
    if (static_cast<size_t>(end - at) < kTokens.size()) return false;
    for (const char wanted : kTokens) {
      if (at != end && *at == static_cast<uint8_t>(wanted)) {
        ++at;
        continue;
      }
      if (end - at < 6 || std::memcmp(at, "\\u00", 4) != 0) return false;
      if (hex(at[4]) * 16 + hex(at[5]) != wanted) return false;
      at += 6;
    }
    return at == end;
  }

  static int hex(uint8_t digit) {
    if (is_digit(digit)) return digit - '0';
    const int letter = digit | 0x20;
    return letter >= 'a' && letter <= 'f' ? letter - 'a' + 10 : 0x1000;
  }

  bool skip_string() {
    for (++at_; at_ != end_; ++at_) {
      if (*at_ == '"') {
        ++at_;
        return true;
      }
      if (*at_ == '\\' && ++at_ == end_) break;
    }
    return fail(QueryFault::syntax);
  }

  // Pass over a value by its strings and brackets.
  bool skip_value() {
    if (sees('"')) return skip_string();
    if (sees('{') || sees('[')) return skip_nested();
    const uint8_t* const first = at_;
    while (at_ != end_ && *at_ != ',' && *at_ != '}' && !is_space(*at_)) ++at_;
    return at_ != first || fail(QueryFault::syntax);
  }

  bool skip_nested() {
    size_t depth = 0;
    while (at_ != end_) {
      if (*at_ == '"') {
        if (!skip_string()) return false;
        continue;
      }
      const bool opens = *at_ == '{' || *at_ == '[';
      const bool closes = *at_ == '}' || *at_ == ']';
      if (opens && ++depth > kMaxQueryDepth) return fail(QueryFault::too_deep);
      ++at_;
      if (closes && --depth == 0) return true;
    }
    return fail(QueryFault::syntax);
  }

  bool read_tokens() {
    query_.has_tokens = true;
    if (at_ == end_) return fail(QueryFault::syntax);
    if (!take('[')) return fail(QueryFault::no_array);
    skip_space();
    if (take(']')) return true;
    for (;;) {
      read_common();
      skip_space();
      if (!read_token()) return false;
      skip_space();
      if (take(']')) return true;
      if (!take(',')) return fail(QueryFault::syntax);
      skip_space();
    }
  }

  // Tokens as they mostly are: eight digits at most, and a comma right behind them. Ends before the
  // first that is anything else, and some bytes or tokens before the last that may come.
  //
  // Where the commas are is found for a block of bytes at once, so that the processor can be busy
  // with several tokens: from one token to the next it need not wait for where that begins.
  void read_common() {
    if constexpr (std::endian::native != std::endian::little) return;
    uint32_t found[kBlock / 2 + 1];  // a token takes two bytes; one more comma ends the loop
    const uint8_t* block = at_;
    const uint8_t* first = at_;
    bool is_common = true;
    while (is_common && static_cast<size_t>(end_ - block) >= kBlock &&
           max_tokens_ - query_.tokens.size() >= std::size(found)) {
      size_t count = 0;
      for (uint64_t commas = commas_of(block); commas != 0; commas &= commas - 1) {
        const uint8_t* const comma = block + std::countr_zero(commas);
        while (is_space(*first)) ++first;  // ends at the comma at the latest
        is_common = read_digits(first, comma, found[count]);
        if (!is_common) break;
        ++count;
        first = comma + 1;
      }
      query_.tokens.insert(query_.tokens.end(), found, found + count);
      block += kBlock;
    }
    at_ = first;
  }

  // Read a number of eight digits at most; false if it is anything else.
  static bool read_digits(const uint8_t* first, const uint8_t* end, uint32_t& value) {
    const auto size = static_cast<size_t>(end - first);
    if (size == 0 || size > 8) return false;
    uint64_t digits;
    std::memcpy(&digits, end - sizeof digits, sizeof digits);  // before the array there is its name
    digits ^= 0x3030303030303030u;  // a digit becomes its value
    const size_t others = 64 - 8 * size;
    digits = digits >> others << others;  // what stands before it becomes zeros
    if ((((digits + 0x7676767676767676u) | digits) & 0x8080808080808080u) != 0) return false;
    value = static_cast<uint32_t>(eight_digits(digits));
    return *first != '0' || size == 1;
  }

  bool read_token() {
    if (at_ == end_) return fail(QueryFault::syntax);
    const uint8_t* const first = at_;
    if (query_.tokens.size() == max_tokens_) return fail(QueryFault::too_many);
    uint64_t value = 0;
    while (at_ != end_ && is_digit(*at_) && at_ - first < 11) value = value * 10 + (*at_++ - '0');
    if (at_ == end_) return fail(QueryFault::syntax);
    const bool is_whole = at_ != first && (*first != '0' || at_ - first == 1);
    if (!is_whole || value > UINT32_MAX || !(is_space(*at_) || *at_ == ',' || *at_ == ']')) {
      return fail(QueryFault::bad_token, first);
    }
    query_.tokens.push_back(static_cast<uint32_t>(value));
    return true;
  }

  bool is_text() const {
    const std::string_view body(reinterpret_cast<const char*>(begin_), offset(end_));
    return is_utf8(body.substr(0, query_.cut_begin)) && is_utf8(body.substr(query_.cut_end));
  }

  const uint8_t* const begin_;
  const uint8_t* const end_;
  const uint8_t* at_;
  const size_t max_tokens_;
  QueryBody& query_;
};

}  // namespace

void read_query(const uint8_t* data, size_t size, size_t max_tokens, QueryBody& query) {
  query.fault = QueryFault::none;
  query.at = query.index = query.cut_begin = query.cut_end = 0;
  query.has_tokens = false;
  query.tokens.clear();
  QueryReader(data, size, max_tokens, query).read();
}

}  // namespace kvindex

// An answer's JSON for all instances at once, written from columns of what their ranks hold.
//
// What never changes (names, keys) is prepared once. A write copies it and puts numbers between,
// with no object for a rank and no allocation.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

namespace kvindex {

// kvindex/service/queries.py has the same numbers, and says what each looks like.
enum class AnswerDialect : uint8_t { dynamo, rfc };

// One value for each row, as of Match.hits: in tokens, cumulative by tier.
struct AnswerColumns {
  const int64_t* device = nullptr;
  const int64_t* host = nullptr;
  const int64_t* tokens = nullptr;
};

// Immutable: any number of threads may write.
class AnswerWriter {
 public:
  struct Instance {
    std::string name;                // as JSON, quotes included
    std::vector<std::string> ranks;  // likewise, one for each of its rows
  };

  // `tenant` as JSON, for dialects whose answers are by tenant. Rows follow each other by instance.
  AnswerWriter(AnswerDialect dialect, std::string_view tenant,
               const std::vector<Instance>& instances);

  size_t rows() const { return ranks_.size(); }
  size_t instances() const { return instances_.size(); }

  // The most bytes that an answer takes, besides what trusts add; a write may use them all.
  size_t most() const { return most_; }

  // Write the answer; return where it ends. `trusts`: for each instance what is to be written at
  // the end of its object, a comma first; null: nothing.
  char* write(const AnswerColumns& columns, const std::string_view* trusts, char* out) const;

 private:
  struct Text {  // in text_
    uint32_t begin = 0;
    uint32_t size = 0;
  };
  struct Rows {
    Text name;
    uint32_t begin = 0;
    uint32_t end = 0;
  };
  class Page;

  Text keep(std::string_view text);
  void write_dynamo(Page& page) const;
  void write_rfc(Page& page) const;

  AnswerDialect dialect_;
  Text tenant_;
  std::vector<Rows> instances_;
  std::vector<Text> ranks_;  // by row, each with the colon after it
  std::string text_;
  size_t most_ = 0;
};

}  // namespace kvindex

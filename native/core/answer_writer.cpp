#include "core/answer_writer.hpp"

#include <algorithm>
#include <charconv>
#include <cstring>

namespace kvindex {
namespace {

// Texts of so many bytes and fewer are copied as if they had so many, without a call: what follows
// them is written over.
constexpr size_t kShort = 32;

constexpr size_t kMostDigits = 20;
// More than what any dialect writes around an answer, an instance and a rank, without their names.
constexpr size_t kFrame = 64;
constexpr size_t kInstance = 96 + 4 * kMostDigits;
constexpr size_t kRank = 96 + 4 * kMostDigits;

}  // namespace

// Where an answer is written, and what it is written from.
class AnswerWriter::Page {
 public:
  // What an instance's ranks hold at most.
  struct Tally {
    int64_t device = 0;
    int64_t host = 0;
    int64_t tokens = 0;
  };

  Page(const AnswerWriter& writer, const AnswerColumns& columns, const std::string_view* trusts,
       char* out)
      : columns_(columns), writer_(writer), trusts_(trusts), out_(out) {}

  char* end() const { return out_; }

  template <size_t size>
  void put(const char (&literal)[size]) {
    std::memcpy(out_, literal, size - 1);
    out_ += size - 1;
  }

  void put(Text text) {
    const char* const from = writer_.text_.data() + text.begin;
    if (text.size <= kShort) {
      std::memcpy(out_, from, kShort);
    } else {
      std::memcpy(out_, from, text.size);
    }
    out_ += text.size;
  }

  // Numbers repeat: tiers that add nothing, ranks that hold the same prefix.
  void put(int64_t number) {
    if (number != number_) {
      number_ = number;
      number_size_ = static_cast<size_t>(
          std::to_chars(digits_, digits_ + sizeof digits_, number).ptr - digits_);
    }
    std::memcpy(out_, digits_, sizeof digits_);
    out_ += number_size_;
  }

  void comma_unless(bool& first) {
    if (!first) put(",");
    first = false;
  }

  void trust(size_t instance) {
    if (trusts_ == nullptr) return;
    const std::string_view text = trusts_[instance];
    if (!text.empty()) std::memcpy(out_, text.data(), text.size());
    out_ += text.size();
  }

  Tally tally(const Rows& rows) const {
    Tally most;
    for (uint32_t row = rows.begin; row < rows.end; ++row) {
      most.device = std::max(most.device, columns_.device[row]);
      most.host = std::max(most.host, columns_.host[row]);
      most.tokens = std::max(most.tokens, columns_.tokens[row]);
    }
    return most;
  }

  // Each rank of an instance that holds anything, with what `value` writes of it.
  template <class Value>
  void holders(const Rows& rows, const int64_t* counted, Value&& value) {
    bool first = true;
    for (uint32_t row = rows.begin; row < rows.end; ++row) {
      if (counted[row] <= 0) continue;
      comma_unless(first);
      put(writer_.ranks_[row]);
      value(row);
    }
  }

  const AnswerColumns& columns_;

 private:
  const AnswerWriter& writer_;
  const std::string_view* trusts_;
  char* out_;
  int64_t number_ = -1;
  size_t number_size_ = 2;
  char digits_[kMostDigits] = {'-', '1'};
};

AnswerWriter::AnswerWriter(AnswerDialect dialect, std::string_view tenant,
                           const std::vector<Instance>& instances)
    : dialect_(dialect) {
  tenant_ = keep(tenant);
  most_ = kFrame + kShort + tenant.size();
  for (const Instance& instance : instances) {
    const auto begin = static_cast<uint32_t>(ranks_.size());
    const Text name = keep(instance.name);
    most_ += kInstance + 2 * instance.name.size();
    for (const std::string& rank : instance.ranks) {
      ranks_.push_back(keep(rank + ":"));
      most_ += kRank + 2 * rank.size();
    }
    instances_.push_back({name, begin, static_cast<uint32_t>(ranks_.size())});
  }
  text_.append(kShort, '\0');  // so that the last text can be copied as a short one
}

AnswerWriter::Text AnswerWriter::keep(std::string_view text) {
  const Text kept{static_cast<uint32_t>(text_.size()), static_cast<uint32_t>(text.size())};
  text_ += text;
  return kept;
}

char* AnswerWriter::write(const AnswerColumns& columns, const std::string_view* trusts,
                          char* out) const {
  Page page(*this, columns, trusts, out);
  switch (dialect_) {
    case AnswerDialect::dynamo: write_dynamo(page); break;
    case AnswerDialect::rfc: write_rfc(page); break;
  }
  return page.end();
}

void AnswerWriter::write_dynamo(Page& page) const {
  const int64_t* const device = page.columns_.device;
  const auto put_device = [&](uint32_t row) { page.put(device[row]); };
  page.put("{\"scores\":{");
  bool first = true;
  for (const Rows& instance : instances_) {
    if (page.tally(instance).device <= 0) continue;
    page.comma_unless(first);
    page.put(instance.name);
    page.put(":{");
    page.holders(instance, device, put_device);
    page.put("}");
  }
  page.put("},\"frequencies\":[],\"instances\":{");
  first = true;
  for (size_t i = 0; i < instances_.size(); ++i) {
    const Page::Tally most = page.tally(instances_[i]);
    if (most.tokens <= 0) continue;
    page.comma_unless(first);
    page.put(instances_[i].name);
    page.put(":{\"longest_matched\":");
    page.put(most.tokens);
    page.put(",\"gpu\":");
    page.put(most.device);
    page.put(",\"dp\":{");
    page.holders(instances_[i], page.columns_.tokens, put_device);
    page.put("},\"cpu\":");
    page.put(most.host);
    page.put(",\"disk\":");
    page.put(most.tokens);
    page.trust(i);
    page.put("}");
  }
  page.put("}}");
}

void AnswerWriter::write_rfc(Page& page) const {
  const int64_t* const tokens = page.columns_.tokens;
  page.put("{");
  page.put(tenant_);
  page.put(":{");
  bool first = true;
  for (size_t i = 0; i < instances_.size(); ++i) {
    const Page::Tally most = page.tally(instances_[i]);
    if (most.tokens <= 0) continue;
    page.comma_unless(first);
    page.put(instances_[i].name);
    page.put(":{\"longest_matched\":");
    page.put(most.tokens);
    page.put(",\"GPU\":");
    page.put(most.device);
    page.put(",\"DP\":{");
    page.holders(instances_[i], tokens, [&](uint32_t row) { page.put(tokens[row]); });
    page.put("},\"CPU\":");
    page.put(most.host);
    page.put(",\"DISK\":");
    page.put(most.tokens);
    page.trust(i);
    page.put("}");
  }
  page.put("}}");
}

}  // namespace kvindex

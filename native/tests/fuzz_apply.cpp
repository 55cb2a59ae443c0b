// libFuzzer target: payloads of several ranks, whatever their bytes, through the whole core.
//
// An input is a byte of settings, then steps: a byte that says what to do and to which of four
// ranks, two bytes of length (little-endian), and so many bytes of payload or of prompt. After each
// step every invariant is checked; in the end everything is removed, and nothing may be left.
#include <algorithm>
#include <array>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <vector>

#include "core/decode.hpp"
#include "tests/expect.hpp"
#include "tests/made_batch.hpp"

namespace {

using namespace kvindex;
using namespace kvindex::tests;

struct Step {
  uint8_t what = 0;
  std::span<const uint8_t> bytes;
};

bool next_step(std::span<const uint8_t>& rest, Step& step) {
  if (rest.size() < 3) return false;
  const size_t length = std::min(size_t{rest[1]} + size_t{rest[2]} * 256, rest.size() - 3);
  step = {rest[0], rest.subspan(3, length)};
  rest = rest.subspan(3 + length);
  return true;
}

class Session {
 public:
  explicit Session(uint8_t settings)
      : index_(made_index(3, limit(settings), settings & 8 ? 2 : 16'384)) {
    for (Index::RankId& rank : ranks_) rank = index_.add();
  }

  void take(const Step& step) {
    Index::RankId& rank = ranks_[step.what & 3];
    switch (step.what >> 2 & 7) {
      case 0:
        ask_for(step.bytes);
        break;
      case 1:
        EXPECT(index_.clear(rank));
        break;
      case 2:
        EXPECT(index_.remove(rank));
        rank = index_.add();
        break;
      case 3:
        configure(rank, step.bytes);
        break;
      default:
        apply(rank, step.bytes);
    }
    index_.check();
  }

  void finish() {
    for (const Index::RankId rank : ranks_) {
      EXPECT(index_.walk(rank).has_value() && index_.statistics(rank).has_value());
      EXPECT(index_.remove(rank));
    }
    index_.check();
    const TreeStatistics statistics = index_.statistics();
    EXPECT(statistics.blocks == 0 && statistics.unique_blocks == 0 && statistics.runs == 0);
  }

 private:
  static std::optional<uint64_t> limit(uint8_t settings) {
    if ((settings & 7) == 0) return std::nullopt;
    return uint64_t{1} << (settings & 7);
  }

  void apply(Index::RankId rank, std::span<const uint8_t> bytes) {
    // Of just this size, so that reading one byte too many is seen.
    const std::unique_ptr<uint8_t[]> payload(new uint8_t[bytes.size()]);
    std::copy(bytes.begin(), bytes.end(), payload.get());
    if (decode(payload.get(), bytes.size(), batch_) != Verdict::decoded) return;
    EXPECT(index_.apply(rank, batch_));
    for (const Event& event : batch_.events) {
      if (event.kind == EventKind::stored && event.tokens_count != 0) ask_for(event);
    }
  }

  // Ask for the tokens of a store, with its extra keys.
  void ask_for(const Event& event) {
    Query query;
    query.tokens.length = query.tokens.ready = event.tokens_count;
    if (event.wide_tokens) {
      query.tokens.kind = TokenView::Kind::u64;
      query.tokens.data = batch_.wide.data() + event.tokens_begin;
    } else {
      query.tokens.data = batch_.tokens.data() + event.tokens_begin;
    }
    query.lora = batch_.text(event.lora);
    for (uint32_t i = 0; i < event.extras_count; ++i) {
      query.extras.emplace_back(batch_.text(batch_.extras[event.extras_begin + i]));
    }
    ask(query);
  }

  // Ask for any tokens in each of the forms that callers have.
  void ask_for(std::span<const uint8_t> bytes) {
    const std::vector<uint32_t> narrow(bytes.begin(), bytes.end());
    std::vector<uint64_t> wide(bytes.begin(), bytes.end());
    for (size_t i = 7; i < wide.size(); i += 8) wide[i] = ~wide[i];
    Query query;
    query.tokens.length = bytes.size();
    for (const auto kind : {TokenView::Kind::u64, TokenView::Kind::i32, TokenView::Kind::u32}) {
      query.tokens.kind = kind;
      const bool is_wide = kind == TokenView::Kind::u64;
      query.tokens.data = is_wide ? static_cast<const void*>(wide.data()) : narrow.data();
      query.tokens.ready = bytes.size() / 2;
      ask(query);
      query.tokens.ready = bytes.size();
      ask(query);
    }
    query.media = {"CPU", "GPU"};
    query.ranks = {{ranks_[0], ranks_[1]}};
    std::sort(query.ranks->begin(), query.ranks->end());
    query.block_size = 4;
    ask(query);
  }

  void ask(const Query& query) {
    index_.match(query, answer_);
    EXPECT(!answer_.starved || query.tokens.ready < query.tokens.length);
    EXPECT(answer_.best < static_cast<int64_t>(answer_.ranks.size()));
    for (const FoundRank& found : answer_.ranks) {
      EXPECT(found.tokens != 0 && found.tokens <= query.tokens.length);
      EXPECT(found.media_begin + found.media_count <= answer_.media.size());
    }
  }

  void configure(Index::RankId rank, std::span<const uint8_t> bytes) {
    static const std::array<GroupSpec, 4> kSpecs{
        GroupSpec{}, GroupSpec{"mamba", std::nullopt, std::nullopt},
        GroupSpec{"sliding_window", 5, std::nullopt},
        GroupSpec{"encoder_only_attention", std::nullopt, std::nullopt}};
    if (bytes.size() < 2) return;
    index_.configure(rank, made_settings(bytes[0] & 3u, kSpecs[bytes[1] & 3u]));
  }

  Index index_;
  std::array<Index::RankId, 4> ranks_{};
  Batch batch_;
  Answer answer_;
};

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  if (size == 0) return 0;
  Session session(data[0]);
  std::span<const uint8_t> rest(data + 1, size - 1);
  Step step;
  for (int steps = 0; steps < 64 && next_step(rest, step); ++steps) session.take(step);
  session.finish();
  return 0;
}

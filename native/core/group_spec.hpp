// What kind of attention a KV cache group serves, and what a rank's events leave unsaid of its cache.
//
// The Python twin, kvindex/wire/events.py, says what each of it means.
#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <set>
#include <string>

namespace kvindex {

struct GroupSpec {
  std::string kind = "full_attention";
  std::optional<int64_t> sliding_window;
  std::optional<int64_t> attention_chunk_size;

  bool operator==(const GroupSpec&) const = default;

  bool has_window() const { return kind == "sliding_window" || kind == "sliding_window_mla"; }
  bool is_mamba() const { return kind == "mamba"; }
  bool is_chunked() const {
    return attention_chunk_size.has_value() && kind == "chunked_local_attention";
  }
  // Whether a hit needs every block before the cut.
  bool needs_all() const { return !(has_window() || is_mamba() || is_chunked()); }
  // Whether prefix caching concerns the group at all.
  bool takes_part() const { return kind != "encoder_only_attention" && kind != "cross_attention"; }
  // Whether windows and chunks have a size.
  bool valid() const {
    return (!has_window() || sliding_window.value_or(0) >= 1) &&
           attention_chunk_size.value_or(1) >= 1;
  }
  // How many blocks a window needs before the cut.
  uint64_t window_blocks(uint64_t block_size) const {
    const uint64_t before = static_cast<uint64_t>(*sliding_window) - 1;
    return before / block_size + (before % block_size != 0);
  }
  // From which token on a hit of `cut` tokens needs blocks.
  uint64_t needed_from(uint64_t cut, uint64_t block_size) const;
};

struct CacheSettings {
  std::map<uint32_t, GroupSpec> groups;
  bool removes_last = false;  // a removal is that of the last copy
  bool reports_full = false;
  bool eagle = false;               // in all groups
  std::set<uint32_t> eagle_groups;  // in these
  uint32_t hash_block_size = 0;  // 0: as learned
  uint32_t offload_chunk = 0;    // 0: a block
  bool upper_bound = false;
  bool resets_connector = false;
};

}  // namespace kvindex

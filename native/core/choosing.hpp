// The arithmetic of cost policies: from columns of what ranks hold and have to do to the cheapest.
//
// The Python twin, `choose_in_python` in kvindex/routing/policies.py, says what everything means.
#pragma once

#include <cstddef>
#include <cstdint>

namespace kvindex {

struct Weights {
  double device = 0;
  double host = 0;
  double storage = 0;
  double fresh = 0;  // of a token to prefill: `new` in Python
  double queued = 0;
  double request = 0;
  double backlog = 0;
  double churn = 0;
  double keep = 0;
  double full = 0;
};

// One value for each row.
struct ChoiceColumns {
  size_t rows = 0;
  const int64_t* device = nullptr;  // tokens held, cumulative by tier
  const int64_t* host = nullptr;
  const int64_t* tokens = nullptr;
  const double* queued = nullptr;
  const double* open = nullptr;
  const double* given = nullptr;
  const double* contexts = nullptr;
  const double* cache = nullptr;
  const uint8_t* usable = nullptr;
};

struct Chosen {
  int64_t row = -1;  // -1: no row is usable
  int64_t attainable = 0;
};

// Choose a row, and write what each costs: infinitely much where it is not usable. A cost that is no
// number counts as infinite, so that one usable row is chosen always. `chance` is in [0, 1).
Chosen choose(int64_t prompt_tokens, const ChoiceColumns& columns, const Weights& weights,
              double chance, double* costs);

}  // namespace kvindex

#include "core/choosing.hpp"

#include <algorithm>
#include <cmath>
#include <limits>

namespace kvindex {

namespace {

constexpr double kInfinite = std::numeric_limits<double>::infinity();

double number(int64_t tokens) { return static_cast<double>(tokens); }

// The rows of equal cost that a choice is among, as far as it has looked.
class Cheapest {
 public:
  void see(double cost, double given) {
    if (count_ == 0 || cost < cost_ || (cost == cost_ && given < given_)) {
      cost_ = cost;
      given_ = given;
      count_ = 1;
    } else if (cost == cost_ && given == given_) {
      ++count_;
    }
  }
  bool is_one(double cost, double given) const { return cost == cost_ && given == given_; }

  size_t count() const { return count_; }

 private:
  double cost_ = kInfinite;
  double given_ = kInfinite;
  size_t count_ = 0;
};

class Choosing {
 public:
  Choosing(int64_t prompt_tokens, const ChoiceColumns& columns, const Weights& weights,
           double* costs)
      : prompt_(number(prompt_tokens)), columns_(columns), weights_(weights), costs_(costs) {
    if (prompt_tokens > 0) per_new_ += weights.backlog * least_queued() / prompt_;
    if (weights.churn != 0.0) mean_given_ = mean_given();
  }

  Chosen run(double chance) {
    Chosen chosen;
    Cheapest all;
    for (size_t row = 0; row < columns_.rows; ++row) {
      costs_[row] = kInfinite;
      if (columns_.usable[row] == 0) continue;
      costs_[row] = cost(row);
      chosen.attainable = std::max(chosen.attainable, columns_.tokens[row]);
      all.see(costs_[row], given(row));
    }
    if (all.count() == 0) return chosen;
    const auto nth = static_cast<size_t>(chance * static_cast<double>(all.count()));
    chosen.row = find(all, std::min(nth, all.count() - 1));
    return chosen;
  }

 private:
  double least_queued() const {
    double least = kInfinite;
    for (size_t row = 0; row < columns_.rows; ++row) {
      if (columns_.usable[row] != 0 && columns_.queued[row] < least) least = columns_.queued[row];
    }
    return least < kInfinite ? least : 0.0;
  }

  // Of what usable rows were given; 0 if it is no finite number.
  double mean_given() const {
    double total = 0;
    size_t rows = 0;
    for (size_t row = 0; row < columns_.rows; ++row) {
      if (columns_.usable[row] == 0) continue;
      total += columns_.given[row];
      ++rows;
    }
    return total > 0.0 && total < kInfinite ? total / static_cast<double>(rows) : 0.0;
  }

  double price(size_t row) const {
    if (!(mean_given_ > 0.0)) return per_new_;
    return per_new_ + weights_.churn * std::max(0.0, columns_.given[row] / mean_given_ - 1.0);
  }

  double credited(size_t row) const {
    const int64_t device = columns_.device[row];
    const int64_t host = columns_.host[row];
    const int64_t tokens = columns_.tokens[row];
    return weights_.device * number(device) + weights_.host * (number(host) - number(device)) +
           weights_.storage * (number(tokens) - number(host));
  }

  double cost(size_t row) const {
    const double waiting = weights_.queued * columns_.queued[row];
    const double missing = prompt_ - credited(row);
    const double work = std::max(0.0, waiting + price(row) * missing);
    const double cost =
        work + weights_.request * columns_.open[row] + weights_.keep * overflow(row, missing);
    return std::isnan(cost) ? kInfinite : cost;
  }

  // The missing tokens that would not fit beside the contexts that the rank should keep.
  double overflow(size_t row, double missing) const {
    const double cache = columns_.cache[row];
    if (!(cache > 0.0)) return 0.0;
    const double over =
        missing + std::min(columns_.contexts[row], cache) - weights_.full * cache;
    return std::max(0.0, std::min(missing, over));
  }

  double given(size_t row) const {
    const double given = columns_.given[row];
    return std::isnan(given) ? kInfinite : given;
  }

  // The nth of the rows that are equally cheap.
  int64_t find(const Cheapest& among, size_t nth) const {
    for (size_t row = 0; row < columns_.rows; ++row) {
      if (columns_.usable[row] == 0 || !among.is_one(costs_[row], given(row))) continue;
      if (nth-- == 0) return static_cast<int64_t>(row);
    }
    return -1;
  }

  const double prompt_;
  const ChoiceColumns& columns_;
  const Weights& weights_;
  double per_new_ = weights_.fresh;  // what a token to prefill costs
  double mean_given_ = 0;
  double* const costs_;
};

}  // namespace

Chosen choose(int64_t prompt_tokens, const ChoiceColumns& columns, const Weights& weights,
              double chance, double* costs) {
  return Choosing(prompt_tokens, columns, weights, costs).run(chance);
}

}  // namespace kvindex

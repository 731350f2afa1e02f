// Explores every state that a small system can reach, step by step, in every order of its steps.
//
// A model has
//   State                       plain bytes without padding
//   State start()
//   void steps(state, next)     calls next(state, fault) for each step that can be made: the state it leads to, and
//                               null or what it must never do
//   bool over(state)            nothing need happen any more
//   std::uint64_t made(state)   grows with every step
//
// Without a fault, with `made` growing, and without a state that has no step and is not over, every run ends well,
// whatever the order of its steps: there is no deadlock, and no circle.
#pragma once

#include <cstdint>
#include <cstring>
#include <string>
#include <type_traits>
#include <vector>

namespace ringcomm::test {

// A set of plain values, by their bytes.
template <typename Value>
class ByteSet {
 public:
  ByteSet() : used_(1 << 12, false), values_(1 << 12) {}

  bool insert(const Value& value) {
    if (2 * (size_ + 1) > values_.size()) grow();
    const std::size_t at = place_of(value);
    if (used_[at]) return false;
    used_[at] = true;
    values_[at] = value;
    ++size_;
    return true;
  }
  std::size_t size() const { return size_; }

 private:
  std::size_t place_of(const Value& value) const {
    static_assert(sizeof(Value) % sizeof(std::uint64_t) == 0);
    std::uint64_t words[sizeof(Value) / sizeof(std::uint64_t)], hash = 0;
    std::memcpy(words, &value, sizeof value);
    for (const std::uint64_t word : words) {
      hash = (hash ^ word) * 0xbf58476d1ce4e5b9u;
      hash ^= hash >> 31;
    }
    std::size_t at = hash & (values_.size() - 1);
    while (used_[at] && std::memcmp(&values_[at], &value, sizeof value) != 0) at = (at + 1) & (values_.size() - 1);
    return at;
  }
  void grow() {
    std::vector<bool> used(2 * used_.size(), false);
    std::vector<Value> values(used.size());
    used.swap(used_);
    values.swap(values_);
    for (std::size_t i = 0; i < values.size(); ++i) {
      if (!used[i]) continue;
      const std::size_t at = place_of(values[i]);
      used_[at] = true;
      values_[at] = values[i];
    }
  }

  std::vector<bool> used_;
  std::vector<Value> values_;
  std::size_t size_ = 0;
};

struct Findings {
  std::size_t states = 0;
  std::string fault;  // the first one found; empty: none
};

template <typename Model>
Findings explore(const Model& model) {
  using State = typename Model::State;
  static_assert(std::has_unique_object_representations_v<State>);
  ByteSet<State> seen;
  std::vector<State> open{model.start()};
  std::string fault;
  seen.insert(open.back());
  while (!open.empty() && fault.empty()) {
    const State state = open.back();
    open.pop_back();
    bool moved = false;
    model.steps(state, [&](const State& after, const char* wrong) {
      moved = true;
      if (wrong) fault = wrong;
      if (model.made(after) <= model.made(state)) fault = "goes in a circle";
      if (seen.insert(after)) open.push_back(after);
    });
    if (!moved && !model.over(state)) fault = "stuck";
  }
  return {seen.size(), fault};
}

}  // namespace ringcomm::test

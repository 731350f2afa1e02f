// The link protocol as a model to explore: ranks that make the accesses of their tapes, in any order that acquire and
// release leave open, and that may be told to stop, lose patience, or die, at any moment.
#pragma once

#include <algorithm>
#include <map>
#include <memory>
#include <utility>
#include <vector>

#include "cpp/cpu/explorer.h"
#include "cpp/cpu/recorded_slot_stream.h"

namespace ringcomm::test {

using cpu::Access;
using cpu::Tape;

enum class Fault {
  kNone,
  kFlagBeforePayload,
  kFlagWithoutRelease,
  kWaitWithoutAcquire,
  kReleaseBeforeRead,
  kReleaseOrdersNoReads,
  kAbortIgnored,      // by a rank that waits
  kAbortNotPassedOn,  // by a rank that was told
  kDeadUnnoticed,
};

constexpr int kMostRanks = 4;
constexpr int kWidest = 16;  // accesses that one may be made ahead of

// An access of a program, with what must have been made before it, in its own rank and in others.
struct Step {
  struct Place {
    int rank;
    std::size_t index;
  };
  explicit Step(const Access* access) : access(access) {}
  const Access* access;
  std::vector<std::size_t> after;  // those of this rank that must be made before
  std::uint32_t just_before = 0;   // the same: bit k for the access k + 1 earlier
  std::vector<Place> needs;        // wait: the store that satisfies it; read: what it is to see
  std::vector<Place> spoilt_by;    // read: what overwrites that
  bool never = false;              // no access satisfies it
};
using Program = std::vector<Step>;

// The programs of all ranks, from their tapes.
class Programs {
 public:
  // `window`: how many accesses one may be made ahead of, as far as acquire and release leave it open.
  Programs(const std::vector<std::unique_ptr<Tape>>& tapes, Fault fault, int window) : window_(window) {
    for (const auto& tape : tapes) {
      std::vector<const Access*> order;
      place(*tape, tapes);
      for (const Access& access : tape->accesses) order.push_back(&access);
      if (fault == Fault::kFlagBeforePayload) swap_all(order, Access::kWrite, Access::kStore);
      if (fault == Fault::kReleaseBeforeRead) swap_all(order, Access::kRead, Access::kStore);
      programs_.emplace_back();
      for (const Access* access : order) programs_.back().emplace_back(access);
    }
    for (int r = 0; r < world_size(); ++r)
      for (std::size_t i = 0; i < programs_[r].size(); ++i) {
        order(programs_[r], i, fault);
        find_needs(programs_[r][i]);
      }
  }

  int world_size() const { return static_cast<int>(programs_.size()); }
  int window() const { return window_; }
  const Program& of(int rank) const { return programs_[rank]; }
  // Flags only grow.
  bool monotone() const {
    std::map<const Flag*, std::uint64_t> last;
    for (const Program& program : programs_)
      for (const Step& step : program) {
        if (step.access->kind != Access::kStore) continue;
        if (step.access->value < last[step.access->flag]) return false;
        last[step.access->flag] = step.access->value;
      }
    return true;
  }

 private:
  // Gives the payloads of a tape their addresses.
  static void place(Tape& tape, const std::vector<std::unique_ptr<Tape>>& tapes) {
    for (Access& access : tape.accesses) {
      if (access.nbytes == 0) continue;
      const Tape& owner = *tapes[access.owner];
      const char* begin = owner.places[access.value] + access.delta;
      access.payload = {begin, begin + access.nbytes};
      if (access.kind == Access::kRead) access.header = owner.header(access.value);
    }
  }
  // The fault of a program that stores before it has read or written.
  static void swap_all(std::vector<const Access*>& order, Access::Kind first, Access::Kind second) {
    for (std::size_t i = 0; i + 1 < order.size(); ++i)
      if (order[i]->kind == first && order[i + 1]->kind == second) std::swap(order[i], order[i + 1]), ++i;
  }
  static bool overlap(const Access& a, const Access& b) {
    const auto some = [](const cpu::Span& x, const cpu::Span& y) { return x.begin && y.begin && x.overlaps(y); };
    return some(a.header, b.header) || some(a.payload, b.payload);
  }
  // Whether `later` may be made before `earlier`, which comes before it in the program of one rank.
  static bool ordered(const Access& earlier, const Access& later, Fault fault) {
    const bool touches = later.kind == Access::kRead || later.kind == Access::kWrite;
    if (earlier.kind == Access::kWait) return fault != Fault::kWaitWithoutAcquire || later.kind != Access::kRead;
    if (later.kind == Access::kStore) {
      if (fault == Fault::kFlagWithoutRelease && earlier.kind == Access::kWrite) return false;
      return fault != Fault::kReleaseOrdersNoReads || earlier.kind != Access::kRead;
    }
    return touches && (earlier.kind == Access::kWrite || later.kind == Access::kWrite) && overlap(earlier, later);
  }
  void order(Program& program, std::size_t i, Fault fault) const {
    for (std::size_t k = 0; k < i; ++k) {
      if (window_ > 0 && !ordered(*program[i - 1 - k].access, *program[i].access, fault)) continue;
      program[i].after.push_back(i - 1 - k);
      if (k < kWidest) program[i].just_before |= 1u << k;
    }
  }
  void find_needs(Step& step) const {
    const Access& access = *step.access;
    if (access.kind == Access::kStore || access.kind == Access::kWrite || (access.flag && access.value == 0)) return;
    const Program& theirs = programs_[access.owner];
    for (std::size_t i = 0; i < theirs.size(); ++i) {
      const Access& other = *theirs[i].access;
      if (access.kind == Access::kWait) {
        if (other.kind != Access::kStore || other.flag != access.flag || other.value < access.value) continue;
        step.needs.push_back({access.owner, i});
        return;
      }
      if (other.kind != Access::kWrite || !overlap(access, other)) continue;
      if (other.value == access.value) step.needs.push_back({access.owner, i});
      if (other.value > access.value) step.spoilt_by.push_back({access.owner, i});
    }
    step.never = step.needs.empty();
  }

  const int window_;
  std::vector<Program> programs_;
};

// Worlds too large to explore: whether acquire and release order every read between the write that it is to see and
// those that overwrite it. A wait for a flag that only grows, once satisfied, stays so; so what can happen is all that
// this order allows, and nothing else. Returns the fault, or an empty string.
inline std::string ordered_fault(const Programs& programs) {
  std::vector<std::size_t> first{0};  // of every rank, in one numbering of all accesses
  for (int r = 0; r < programs.world_size(); ++r) first.push_back(first.back() + programs.of(r).size());
  const std::size_t total = first.back();
  std::vector<std::vector<bool>> before(total);  // what comes before an access in every order; empty: not yet known
  const auto known = [&](int r, std::size_t i) { return !before[first[r] + i].empty(); };
  const auto visit = [&](int r, std::size_t i) {
    const Step& step = programs.of(r)[i];
    std::vector<std::size_t> causes;
    for (const std::size_t earlier : step.after) causes.push_back(first[r] + earlier);
    if (step.access->kind == Access::kWait)
      for (const auto& [rank, index] : step.needs) causes.push_back(first[rank] + index);
    if (step.never || std::any_of(causes.begin(), causes.end(), [&](std::size_t c) { return before[c].empty(); }))
      return false;
    std::vector<bool> all(total, false);
    for (const std::size_t cause : causes) {
      if (all[cause]) continue;
      all[cause] = true;
      for (std::size_t k = 0; k < total; ++k) all[k] = all[k] || before[cause][k];
    }
    before[first[r] + i] = std::move(all);
    return true;
  };
  for (bool moved = true; moved;) {
    moved = false;
    for (int r = 0; r < programs.world_size(); ++r)
      for (std::size_t i = 0; i < programs.of(r).size(); ++i) moved |= !known(r, i) && visit(r, i);
  }
  for (int r = 0; r < programs.world_size(); ++r)
    for (std::size_t i = 0; i < programs.of(r).size(); ++i) {
      if (!known(r, i)) return "stuck";
      const Step& step = programs.of(r)[i];
      if (step.access->kind != Access::kRead) continue;
      for (const auto& [rank, index] : step.needs)
        if (!before[first[r] + i][first[rank] + index]) return "a payload is read before it is written";
      for (const auto& [rank, index] : step.spoilt_by)
        if (!before[first[rank] + index][first[r] + i]) return "a payload is overwritten before it is read";
    }
  return "";
}

// What may befall the ranks.
struct Events {
  int impatient = -1;    // this rank's limit may pass wherever it waits
  bool outside = false;  // a thread that is no rank's may abort at any time
  bool death = false;    // one rank may die at any time
};

struct LinkModel {
  enum Mode : std::uint8_t { kRunning, kTelling, kEnded, kDead };
  struct Rank {
    std::uint16_t done = 0;   // all accesses below this one have been made
    std::uint16_t ahead = 0;  // bit k: the access done + 1 + k as well
    std::uint8_t mode = kRunning;
    std::uint8_t told = 0;  // kTelling: ranks it has told
  };
  struct State {
    Rank ranks[kMostRanks];
    std::uint8_t abort = 0;    // bit r: the abort flag of rank r
    std::uint8_t outside = 0;  // ranks that the outside has told
    std::uint8_t deaths = 0;
    std::uint8_t unused[5] = {};
  };

  LinkModel(const Programs& programs, const Events& events, Fault fault)
      : programs_(programs), events_(events), fault_(fault) {}

  State start() const { return {}; }

  template <typename Next>
  void steps(const State& state, const Next& next) const {
    for (int r = 0; r < programs_.world_size(); ++r) {
      if (state.ranks[r].mode == kRunning) run(state, r, next);
      if (state.ranks[r].mode == kTelling) tell(state, r, next);
      if (events_.death && state.deaths == 0 && state.ranks[r].mode != kDead) {
        State after = state;
        after.ranks[r].mode = kDead;
        after.deaths = 1;
        next(after, nullptr);
      }
    }
    if (events_.outside && state.outside < programs_.world_size()) {
      State after = state;
      after.abort |= 1u << after.outside++;
      next(after, nullptr);
    }
  }
  bool over(const State& state) const {
    for (int r = 0; r < programs_.world_size(); ++r) {
      const Rank& rank = state.ranks[r];
      if (rank.mode == kTelling || (rank.mode == kRunning && rank.done < programs_.of(r).size())) return false;
    }
    return true;
  }
  std::uint64_t made(const State& state) const {
    std::uint64_t sum = state.outside + state.deaths;
    for (const Rank& rank : state.ranks)
      sum += 32ull * rank.done + 32ull * __builtin_popcount(rank.ahead) + 8 * rank.mode + rank.told;
    return sum;
  }

 private:
  static bool made(const Rank& rank, std::size_t i) {
    return i < rank.done || (i > rank.done && i - rank.done <= kWidest && rank.ahead >> (i - rank.done - 1) & 1);
  }
  static void make(Rank& rank, std::size_t i) {
    if (i > rank.done) {
      rank.ahead |= 1u << (i - rank.done - 1);
      return;
    }
    do {
      ++rank.done;
      const bool next_too = rank.ahead & 1;
      rank.ahead >>= 1;
      if (!next_too) return;
    } while (true);
  }
  bool possible(const State& state, int r, std::size_t i) const {
    const Rank& rank = state.ranks[r];
    const Step& step = programs_.of(r)[i];
    if (made(rank, i)) return false;
    for (std::size_t k = 0; k < kWidest && rank.done + k < i; ++k)
      if (step.just_before >> k & 1 && !made(rank, i - 1 - k)) return false;
    if (step.access->kind != Access::kWait) return true;
    return !step.never && (step.needs.empty() || made(state.ranks[step.needs[0].rank], step.needs[0].index));
  }
  const char* wrong(const State& state, const Step& step) const {
    if (step.access->kind != Access::kRead) return nullptr;
    if (step.never) return "a payload is read that nobody writes";
    for (const auto& [rank, index] : step.needs)
      if (!made(state.ranks[rank], index)) return "a payload is read before it is written";
    for (const auto& [rank, index] : step.spoilt_by)
      if (made(state.ranks[rank], index)) return "a payload is overwritten before it is read";
    return nullptr;
  }
  std::size_t end_of_window(const State& state, int r) const {
    return std::min<std::size_t>(programs_.of(r).size(), state.ranks[r].done + 1 + programs_.window());
  }

  template <typename Next>
  void run(const State& state, int r, const Next& next) const {
    bool waits = false;
    for (std::size_t i = state.ranks[r].done; i < end_of_window(state, r); ++i) {
      const Step& step = programs_.of(r)[i];
      if (step.access->kind == Access::kWait && !waits && !made(state.ranks[r], i)) {
        waits = true;
        check_peers(state, r, step.access->call, next);
      }
      if (!possible(state, r, i)) continue;
      State after = state;
      make(after.ranks[r], i);
      next(after, wrong(state, step));
    }
  }
  // What a rank does now and then while it waits.
  template <typename Next>
  void check_peers(const State& state, int r, std::uint64_t call, const Next& next) const {
    const bool told = state.abort >> r & 1 && fault_ != Fault::kAbortIgnored;
    if (!told && !misses_a_rank(state, r, call) && events_.impatient != r) return;
    State after = state;
    after.ranks[r].mode = told && fault_ == Fault::kAbortNotPassedOn ? kEnded : kTelling;
    next(after, nullptr);
  }
  // Whether a dead rank has not ended the call that this rank is in.
  bool misses_a_rank(const State& state, int r, std::uint64_t call) const {
    if (fault_ == Fault::kDeadUnnoticed) return false;
    for (int p = 0; p < programs_.world_size(); ++p) {
      const Rank& rank = state.ranks[p];
      if (p == r || rank.mode != kDead) continue;
      if (rank.done < programs_.of(p).size() && programs_.of(p)[rank.done].access->call <= call) return true;
    }
    return false;
  }
  template <typename Next>
  void tell(const State& state, int r, const Next& next) const {
    State after = state;
    Rank& rank = after.ranks[r];
    after.abort |= 1u << rank.told++;
    if (rank.told == programs_.world_size()) rank.mode = kEnded;
    next(after, nullptr);
  }

  const Programs& programs_;
  const Events events_;
  const Fault fault_;
};

}  // namespace ringcomm::test

// How a rank falls asleep and is woken, explored: the steps of cpu/group/wait.h and of the bell in cpu/group/state.h,
// told again. Which wake-ups cannot be lost, and which are made up for by the end of a sleep, 20 ms later.
#include <cstdio>

#include "cpp/cpu/explorer.h"
#include "cpp/ranks.h"

namespace ringcomm::test {
namespace {

constexpr int kSleepers = 2, kPosters = 2;

enum class Protocol {
  kFlag,       // post and wait_flag: the word slept on is the flag itself
  kBell,       // ring_bell and sleep_by_bell: whoever has set a flag rings if somebody sleeps
  kAbortBell,  // abort: rings in any case, but a sleeper looks at the abort flag only before it hears the bell
  kAbortFlag,  // abort, for those asleep on another flag
};
enum class Fault {
  kNone,
  kLateStore,    // the flag becomes visible after the look at the counter
  kEarlyLook,    // the sleeper looks at the flag before it is counted
  kNotCompared,  // the kernel puts it to sleep whatever the word holds
  kPosterDies,   // between its store and what follows
};

// Every poster sets its flag to 1, 2, ... `posts`; every sleeper waits for the sum.
struct SleepModel {
  enum Sleeper : std::uint8_t { kLook, kCount, kSee, kLookAgain, kSleep, kAsleep, kUncount, kCheck, kDone };
  enum Poster : std::uint8_t { kStore, kLookForSleepers, kRing, kWake };
  struct State {
    struct {
      std::uint8_t at = kLook, seen = 0;
      std::uint16_t rounds = 0;
    } sleepers[kSleepers];
    struct {
      std::uint8_t at = kStore, posted = 0, pending = 0, dead = 0;
    } posters[kPosters];
    std::uint8_t counted = 0, rung = 0, sum = 0, unused[5] = {};
  };

  Protocol protocol;
  Fault fault;
  int num_sleepers, num_posters, posts;
  bool slices;  // a sleep ends by itself, once nothing else happens

  State start() const { return {}; }
  bool over(const State& s) const {
    for (int i = 0; i < num_sleepers; ++i)
      if (s.sleepers[i].at != kDone) return false;
    return true;
  }
  std::uint64_t made(const State& s) const {
    std::uint64_t made = 0;
    for (const auto& sleeper : s.sleepers) made += 16 * sleeper.rounds + sleeper.at;
    for (const auto& poster : s.posters) made += 8 * poster.posted + 2 * poster.at + poster.dead - poster.pending;
    return made;
  }
  template <typename Next>
  void steps(const State& s, const Next& next) const {
    bool posting = false;
    for (int i = 0; i < num_posters; ++i) posting |= post(s, i, next);
    for (int i = 0; i < num_sleepers; ++i) sleep(s, i, posting, next);
  }

 private:
  bool uses_bell() const { return protocol == Protocol::kBell || protocol == Protocol::kAbortBell; }
  std::uint8_t word(const State& s) const {
    if (protocol == Protocol::kAbortFlag) return 0;  // of a flag that stays as it is
    return uses_bell() ? s.rung : s.sum;
  }
  bool satisfied(const State& s) const { return s.sum == num_posters * posts; }

  // Whether the poster has still something to do.
  template <typename Next>
  bool post(const State& s, int i, const Next& next) const {
    const auto& poster = s.posters[i];
    State after = s;
    auto& mine = after.posters[i];
    if (poster.pending) {  // the store becomes visible some time
      mine.pending = 0;
      ++after.sum;
      next(after, nullptr);
      after = s;
    }
    if (poster.dead || poster.posted == posts || (poster.at == kStore && poster.pending)) return poster.pending != 0;
    if (fault == Fault::kPosterDies && poster.at != kStore) {
      mine.dead = 1;
      next(after, nullptr);
      after = s;
    }
    advance(s, poster.at, after, mine);
    next(after, nullptr);
    return true;
  }
  template <typename Mine>
  void advance(const State& s, std::uint8_t at, State& after, Mine& mine) const {
    if (at == kStore) {
      (fault == Fault::kLateStore ? mine.pending : after.sum) += 1;
      mine.at = protocol == Protocol::kAbortBell ? kRing : kLookForSleepers;
      return;
    }
    if (at == kLookForSleepers && s.counted != 0 && protocol != Protocol::kAbortFlag) {
      mine.at = uses_bell() ? kRing : kWake;
      return;
    }
    if (at == kRing) {
      ++after.rung;
      mine.at = kWake;
      return;
    }
    for (int k = 0; at == kWake && k < num_sleepers; ++k)
      if (s.sleepers[k].at == kAsleep) after.sleepers[k].at = kUncount;
    mine.at = kStore;
    ++mine.posted;
  }

  template <typename Next>
  void sleep(const State& s, int i, bool posting, const Next& next) const {
    State after = s;
    auto& mine = after.sleepers[i];
    ++mine.at;
    switch (s.sleepers[i].at) {
      case kLook:
        if (satisfied(s)) mine.at = kDone;
        break;
      case kCount:
        ++after.counted;
        break;
      case kSee:
        mine.seen = word(s);
        break;
      case kLookAgain:
        if (fault == Fault::kEarlyLook) break;
        if (protocol == Protocol::kFlag ? mine.seen == posts : protocol == Protocol::kBell && satisfied(s))
          mine.at = kUncount;
        break;
      case kSleep:
        if (fault != Fault::kNotCompared && word(s) != mine.seen) mine.at = kUncount;
        break;
      case kAsleep:
        if (!slices || posting) return;
        break;
      case kUncount:
        --after.counted;
        break;
      case kCheck:
        if (!satisfied(s)) {
          mine = {};
          mine.rounds = s.sleepers[i].rounds + 1;
        }
        break;
      default:
        return;
    }
    next(after, nullptr);
  }
};

struct Case {
  const char* what;
  Protocol protocol;
  Fault fault;
  bool may_sleep_on;  // until the sleep ends by itself
};
constexpr Case kCases[] = {
    {"flag", Protocol::kFlag, Fault::kNone, false},
    {"bell", Protocol::kBell, Fault::kNone, false},
    {"flag, its poster dies before it wakes", Protocol::kFlag, Fault::kPosterDies, true},
    {"bell, its poster dies before it rings", Protocol::kBell, Fault::kPosterDies, true},
    {"bell, a look that overtakes the counter", Protocol::kBell, Fault::kEarlyLook, true},
    {"abort, asleep by the bell", Protocol::kAbortBell, Fault::kNone, true},
    {"abort, asleep on a flag", Protocol::kAbortFlag, Fault::kNone, true},
    {"planted: flag, a store that is visible late", Protocol::kFlag, Fault::kLateStore, true},
    {"planted: bell, a store that is visible late", Protocol::kBell, Fault::kLateStore, true},
    {"planted: flag, not compared by the kernel", Protocol::kFlag, Fault::kNotCompared, true},
    {"planted: bell, not compared by the kernel", Protocol::kBell, Fault::kNotCompared, true},
};

void check(const Case& c) {
  std::size_t states = 0;
  for (int sleepers = 1; sleepers <= kSleepers; ++sleepers)
    for (int posters = 1; posters <= (c.protocol == Protocol::kBell ? kPosters : 1); ++posters) {
      const int posts = c.may_sleep_on ? 1 : posters == 1 ? 3 : 2;
      const Findings found = explore(SleepModel{c.protocol, c.fault, sleepers, posters, posts, false});
      require(found.fault == (c.may_sleep_on ? "stuck" : ""), concat(c.what, ": ", found.fault));
      const Findings sliced = explore(SleepModel{c.protocol, c.fault, sleepers, posters, posts, true});
      require(sliced.fault.empty(), concat(c.what, ", where sleeps end: ", sliced.fault));
      states += found.states + sliced.states;
    }
  std::printf("%s: %zu states, %s\n", c.what, states, c.may_sleep_on ? "until the sleep ends" : "no wake-up is lost");
}

}  // namespace
}  // namespace ringcomm::test

int main() {
  for (const auto& c : ringcomm::test::kCases) ringcomm::test::check(c);
  std::printf("cpu_sleep_model_test passed\n");
}

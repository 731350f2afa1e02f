#include <sched.h>

#include <vector>

#include "fibers.h"

namespace ringcomm::emulator {
namespace {

constexpr std::uint64_t kBudget = 4096;     // switches between two looks at the clock
constexpr std::uint64_t kTickNs = 200'000;  // waiting threads look again
constexpr int kMostRounds = 1024;           // of looking again without a write: kernels check only now and then

}  // namespace

struct Simulation::State {
  explicit State(const Options& options) : options(options), scheduler(options.seed, options.preempt_every) {}

  void admit() {
    for (; next < grids.size(); ++next)
      for (Grid& grid = *grids[next]; grid.left() > 0; ++resident) {
        if (options.max_resident && resident == options.max_resident) return;
        scheduler.start_block(&grid);
      }
  }
  std::string not_started() const {
    std::string text;
    for (const auto& grid : grids)
      if (const unsigned left = grid->left())
        text += "  " + grid->name + ": not started (no room on the device)  x" + std::to_string(left) + " blocks\n";
    return text;
  }
  // All wait. False: for ever.
  bool look_again() {
    if (options.exact) {
      if (scheduler.writes() != writes) rounds = 0;
      writes = scheduler.writes();
      if (++rounds > kMostRounds) return false;
    } else {
      sched_yield();
    }
    return scheduler.wake_spinners();
  }
  void tick() {
    if (options.exact || global_timer_ns() - ticked < kTickNs) return;
    scheduler.wake_spinners();
    ticked = global_timer_ns();
  }
  // The error, empty if every thread returned.
  std::string run() {
    for (;;) switch (scheduler.run(kBudget)) {
        case Scheduler::Pause::kBlockEnded:
          --resident;
          admit();
          break;
        case Scheduler::Pause::kBudget:
          tick();
          break;
        case Scheduler::Pause::kFailed:
          return scheduler.failure();
        case Scheduler::Pause::kParked:
          if (!scheduler.has_blocks()) return "";
          if (!look_again()) return "DEADLOCK: every live thread waits\n" + scheduler.who_waits() + not_started();
      }
  }

  const Options options;
  Scheduler scheduler;
  std::vector<std::unique_ptr<Grid>> grids;
  std::size_t next = 0;
  unsigned resident = 0;
  std::uint64_t writes = 0, ticked = 0;
  int rounds = 0;
};

Simulation::Simulation(const Options& options) : state_(std::make_unique<State>(options)) {}
Simulation::~Simulation() = default;

void Simulation::launch_body(const std::string& name, Body body, dim3 grid, dim3 block) {
  state_->grids.push_back(std::make_unique<Grid>(name, std::move(body), grid, block));
}

bool Simulation::run() {
  for (const auto& grid : state_->grids) grid->before_start();
  state_->admit();
  error = state_->run();
  switches = state_->scheduler.switches();
  for (const auto& grid : state_->grids) {
    if (!grid->finished()) state_->scheduler.abandon(grid.get());
    grid->after_end();
  }
  return error.empty();
}

}  // namespace ringcomm::emulator

// The link protocol, explored: the collectives of the cpu engine in small worlds, in every order of their accesses that
// acquire and release leave open, with an abort, a limit that passes or a death at every moment. Prints the states of
// each world. Faults are planted too, and must be found.
#include <cstdio>
#include <cstring>
#include <functional>

#include "cpp/cpu/link_model.h"
#include "cpp/ranks.h"

namespace ringcomm::test {
namespace {

using cpu::RecordedGroup;
using cpu::RecordedSlotStream;

struct Shape {
  int world_size;
  std::uint64_t depth, lag;
  std::size_t slot_bytes = 4096;
  std::uint64_t free_credit = 0;  // a fault: slots that a writer takes without credit
  bool spare = true;              // a fault without: an area of `depth` slots
};

using Tapes = std::vector<std::unique_ptr<Tape>>;
using Collective = std::function<std::uint64_t(RecordedSlotStream&)>;  // returns the tickets it takes

struct Planned {
  Call call;
  Collective run;
};
using Plan = std::vector<Planned>;

Planned plan(Op op, std::size_t nbytes, const Collective& run, int root = 0) {
  Planned planned{{}, run};
  planned.call.op = op;
  planned.call.count = nbytes;  // of uint8
  planned.call.root = root;
  return planned;
}

// ---- what the ranks call -------------------------------------------------------------------------------------------

using Staged = std::uint64_t (*)(RecordedSlotStream&, std::uint64_t first);

Collective private_buffers(Staged staged) {
  return [=](RecordedSlotStream& slots) { return staged(slots, 0); };
}
// The rank says with the first ticket that its buffers are private, and goes on.
Collective published(Staged staged) {
  return [=](RecordedSlotStream& slots) {
    slots.wait_credit(0);
    slots.publish(0);
    return 1 + staged(slots, 1);
  };
}
std::uint64_t ring(RecordedSlotStream& slots) { return cpu::ring_collective(slots); }

// As cpu/collectives/direct.cpp: the peers read this rank's input where it is, which the user writes before the call.
std::uint64_t in_place(RecordedSlotStream& slots) {
  Tape& mine = *cpu::recording;
  const std::uint64_t name = cpu::kNamedTickets / 2 + mine.sequence;
  mine.places[name] = mine.input;
  mine.touch(Access::kWrite, cpu::payload_name(mine.rank, name), sizeof mine.input);
  for (const std::uint64_t i : {0, 1}) {
    slots.wait_credit(i);
    slots.publish(i);
    slots.await_all(i);
    for (int p = 0; i == 0 && p < slots.group().world_size(); ++p)
      if (p != mine.rank) mine.touch(Access::kRead, cpu::payload_name(p, name), sizeof mine.input);
  }
  return 2;
}

Tapes blank_tapes(const Shape& shape) {
  Tapes tapes;
  const std::size_t area_slot_bytes =
      shape.spare ? shape.slot_bytes : shape.slot_bytes * shape.depth / (shape.depth + 1) / kLineBytes * kLineBytes;
  for (int r = 0; r < shape.world_size; ++r)
    tapes.push_back(std::make_unique<Tape>(r, shape.world_size, shape.depth, shape.slot_bytes, area_slot_bytes));
  cpu::recorded_lag = shape.lag;
  cpu::credit_too_much = shape.free_credit;
  return tapes;
}

// Every rank makes the calls by itself.
Tapes record(const Shape& shape, const Plan& calls) {
  Tapes tapes = blank_tapes(shape);
  std::vector<Tape*> all;
  for (const auto& tape : tapes) all.push_back(tape.get());
  static char buffer[1];  // of the user: where it lies is all the same
  for (Tape* tape : all) {
    cpu::recording = tape;
    RecordedGroup group(all);
    for (const Planned& planned : calls) {
      Call call = planned.call;
      call.input = call.output = buffer;
      RecordedSlotStream slots(group, call);
      slots.finish(planned.run(slots));
    }
  }
  return tapes;
}

// A message in slices, as cpu/collectives/p2p.cpp passes it: rank 0 to rank 1, over the board of that pair.
Tapes record_message(const Shape& shape, const std::vector<std::size_t>& slices) {
  Tapes tapes = blank_tapes(shape);
  Tape &source = *tapes[0], &destination = *tapes[1];
  for (std::uint64_t t = 0; t < slices.size(); ++t) {
    const Flag* published = &source.board.header(t)->flag;
    source.wait(1, &destination.consumed.value, credit_needed(t, shape.depth + shape.free_credit));
    source.write_header(t);
    source.places[t] = source.board.open(t, slices[t], source.cursor);
    source.touch(Access::kWrite, cpu::payload_name(0, t), slices[t]);
    source.store(published, t + 1);
    destination.wait(0, published, t + 1);
    destination.read_header(source, t);
    destination.touch(Access::kRead, cpu::payload_name(0, t), slices[t]);
    destination.store(&destination.consumed.value, t + 1);
  }
  return tapes;
}

// ---- the worlds ----------------------------------------------------------------------------------------------------

// Calls that come round the slots of every rank at least twice, with payloads of several lengths.
Plan lockstep(std::size_t slot_bytes, int windows) {
  return {plan(Op::kAllReduce, slot_bytes * windows - 1000, private_buffers(cpu::staged_oneshot_all_reduce))};
}
Plan two_phases(const Shape& shape, int windows) {
  const std::size_t shard = shape.slot_bytes / (shape.world_size + 1) / 64 * 64;
  return {plan(Op::kAllReduce, shard * shape.world_size * windows, private_buffers(cpu::staged_two_phase_reduce))};
}
Plan chain(std::size_t slot_bytes, int windows, int root) {
  return {plan(Op::kBroadcast, slot_bytes * windows, ring, root), plan(Op::kReduce, slot_bytes * windows, ring, root),
          plan(Op::kBarrier, 0, private_buffers(cpu::staged_barrier))};
}
Plan rooted(std::size_t slot_bytes, int root) {
  return {plan(Op::kBroadcast, slot_bytes * 4, private_buffers(cpu::staged_broadcast), root),
          plan(Op::kGather, slot_bytes * 2, private_buffers(cpu::staged_gather), root),
          plan(Op::kScatter, slot_bytes, private_buffers(cpu::staged_scatter), root)};
}
Plan everything(const Shape& shape) {
  const std::size_t n = shape.slot_bytes;
  Plan all = two_phases(shape, 9);
  for (int root = 0; root < shape.world_size; ++root) {
    for (const Plan& plan : {chain(n, 5, root), rooted(n, root)}) all.insert(all.end(), plan.begin(), plan.end());
    all.push_back(plan(Op::kAllReduce, 100 + root, private_buffers(cpu::staged_oneshot_all_reduce)));
    all.push_back(plan(Op::kReduce, 3 * n, published(cpu::staged_two_phase_reduce), root));
    all.push_back(plan(Op::kAllGather, 0, in_place));
    all.push_back(plan(Op::kBarrier, 0, private_buffers(cpu::staged_barrier)));
  }
  all.push_back(plan(Op::kAllReduce, 2 * n * shape.world_size, ring));
  all.push_back(plan(Op::kReduceScatter, 2 * n, published(cpu::staged_reduce_scatter)));
  all.push_back(plan(Op::kAllGather, 5 * n - 1, published(cpu::staged_gather)));
  all.push_back(plan(Op::kAllToAll, n + 1, published(cpu::staged_all_to_all)));
  return all;
}

struct World {
  const char* what;
  Shape shape;
  Plan plan;
  int window;  // accesses that one may be made ahead of
  bool large = false;
};

std::vector<World> worlds() {
  const Plan twice_in_place(5, plan(Op::kAllGather, 0, in_place));
  const Plan told_first{plan(Op::kAllReduce, 4096 * 8, published(cpu::staged_oneshot_all_reduce))};
  return {
      {"lockstep", {2, 3, 2}, lockstep(4096, 8), 16},
      {"lockstep", {3, 3, 2}, lockstep(4096, 8), 3},
      {"lockstep", {4, 2, 1}, lockstep(4096, 5), 0, true},
      {"published", {2, 4, 2}, told_first, 16},
      {"published", {3, 4, 2}, told_first, 1, true},
      {"two phases", {2, 3, 1}, two_phases({2, 3, 1}, 6), 16, true},
      {"two phases", {3, 3, 1}, two_phases({3, 3, 1}, 6), 1, true},
      {"ring", {2, 2, 1}, {plan(Op::kAllReduce, 4096 * 2 * 3, ring)}, 16},
      {"ring", {3, 2, 1}, {plan(Op::kAllReduce, 4096 * 3 * 2, ring)}, 3},
      {"ring", {4, 2, 1}, {plan(Op::kReduceScatter, 4096 * 2, ring)}, 0, true},
      {"chain", {3, 2, 1}, chain(4096, 3, 1), 3},
      {"chain", {4, 2, 1}, chain(4096, 3, 2), 0, true},
      {"rooted", {2, 2, 1}, rooted(4096, 1), 16},
      {"rooted", {3, 3, 2}, rooted(4096, 1), 2},
      {"rooted", {4, 4, 2}, rooted(4096, 3), 0, true},
      {"in place", {2, 3, 1}, twice_in_place, 16},
      {"in place", {3, 3, 1}, twice_in_place, 2, true},
      {"everything", {2, 3, 1}, everything({2, 3, 1}), 2, true},
  };
}

// Both ways of looking: at every state, and at the order that acquire and release make.
std::string explored_fault(const Tapes& tapes, int window, Fault fault, std::size_t* states) {
  const Programs programs(tapes, fault, window);
  const Findings found = explore(LinkModel(programs, {}, fault));
  if (states) *states = found.states;
  return found.fault;
}
std::string unordered_fault(const Tapes& tapes, Fault fault = Fault::kNone) {
  const Programs programs(tapes, fault, kWidest);
  require(programs.monotone(), "a flag falls");
  return ordered_fault(programs);
}

void explore_worlds(bool quick) {
  for (const World& world : worlds()) {
    if (quick && world.large) continue;
    const Tapes tapes = record(world.shape, world.plan);
    std::size_t states = 0;
    const std::string fault = explored_fault(tapes, world.window, Fault::kNone, &states);
    const Shape& s = world.shape;
    const std::string what = concat(world.what, ": ", s.world_size, " ranks, ", s.depth, " slots, lag ", s.lag, ", ",
                                    tapes[0]->ticket, " tickets, ", world.window, " ahead");
    std::printf("%s: %zu states\n", what.c_str(), states);
    require(fault.empty(), what + ": " + fault);
    for (const auto& tape : tapes) require(tape->ticket == tapes[0]->ticket, what + ": the ranks count apart");
    require(tapes[0]->ticket >= 2 * s.depth, what + ": the slots are not filled twice");
    require(unordered_fault(tapes).empty(), what + ": " + unordered_fault(tapes));
  }
}

// The engine's own number of slots and lag, and more ranks: by the order of the accesses alone.
void order_large_worlds(bool quick) {
  for (int world_size = 2; world_size <= (quick ? 2 : 4); ++world_size)
    for (const std::size_t slot_bytes : {4096, 65536}) {
      const Shape shape{world_size, cpu::kDepth, cpu::kLag, slot_bytes};
      const Tapes tapes = record(shape, everything(shape));
      const std::string what = concat(world_size, " ranks, ", shape.depth, " slots, ", tapes[0]->ticket, " tickets");
      std::printf("everything in order: %s\n", what.c_str());
      require(unordered_fault(tapes).empty(), what + ": " + unordered_fault(tapes));
    }
}

// Messages of slices of all lengths, one after the other: none lies where another is still read.
void message_worlds(bool quick) {
  const Shape shape{2, 2, 1};
  const std::size_t lengths[] = {100, kTinyBytes + 1, 3000, shape.slot_bytes};
  const int slices = quick ? 4 : 6;
  std::size_t states = 0, all = 0;
  for (int choice = 0; choice < 1 << (2 * slices); ++choice) {
    std::vector<std::size_t> sizes;
    for (int i = 0; i < slices; ++i) sizes.push_back(lengths[choice >> (2 * i) & 3]);
    const std::string fault = explored_fault(record_message(shape, sizes), kWidest, Fault::kNone, &states);
    require(fault.empty(), concat("message ", choice, ": ", fault));
    all += states;
  }
  std::printf("messages: 2 slots, %d slices of 4 lengths: %zu states\n", slices, all);
}

// ---- how a communicator ends ---------------------------------------------------------------------------------------

std::string ending_fault(const Tapes& tapes, const Events& events, Fault fault, std::size_t& states) {
  const Programs programs(tapes, fault, 0);
  const Findings found = explore(LinkModel(programs, events, fault));
  states += found.states;
  return found.fault;
}

// An abort from outside, a limit that passes on one rank, a death, and one who dies while it tells the others: at
// every moment. Every rank that lives comes to its end.
void end_worlds(bool quick) {
  const std::pair<const char*, std::pair<Shape, Plan>> worlds[] = {
      {"lockstep", {{2, 3, 2}, lockstep(4096, 8)}},
      {"two phases", {{2, 3, 1}, two_phases({2, 3, 1}, 6)}},
      {"chain", {{3, 2, 1}, chain(4096, 3, 2)}},
      {"rooted", {{3, 3, 2}, rooted(4096, 1)}},
      {"ring", {{3, 2, 1}, {plan(Op::kAllReduce, 4096 * 3 * 2, ring)}}},
  };
  for (const auto& [what, world] : worlds) {
    const int world_size = world.first.world_size;
    if (quick && world_size > 2) continue;
    const Tapes tapes = record(world.first, world.second);
    std::size_t states = 0;
    std::string fault = ending_fault(tapes, {-1, true, false}, Fault::kNone, states);
    for (int r = -1; r < world_size && fault.empty(); ++r) {
      fault = ending_fault(tapes, {r, false, true}, Fault::kNone, states);
      if (r >= 0 && fault.empty()) fault = ending_fault(tapes, {r, false, false}, Fault::kNone, states);
    }
    std::printf("%s, ended at every moment: %d ranks, %zu states\n", what, world_size, states);
    require(fault.empty(), concat(what, ", ended: ", fault));
  }
}

// ---- planted faults ------------------------------------------------------------------------------------------------

void find_planted_faults() {
  const auto found = [](const char* what, const Shape& shape, const Plan& plan, Fault fault = Fault::kNone) {
    const Tapes tapes = record(shape, plan);
    const std::string explored = explored_fault(tapes, kWidest, fault, nullptr),
                      ordered = unordered_fault(tapes, fault);
    require(!explored.empty(), concat("unseen by the explorer: ", what));
    require(!ordered.empty(), concat("unseen in the order: ", what));
    std::printf("planted: %s: %s\n", what, explored.c_str());
  };
  const Shape shape{2, 3, 2};
  const Plan calls = lockstep(4096, 8);
  found("credit of one too many", {2, 3, 2, 4096, 1}, calls);
  Plan shifted = lockstep(4096, 8);
  shifted.insert(shifted.begin(), plan(Op::kAllReduce, 3000, private_buffers(cpu::staged_oneshot_all_reduce)));
  found("an area of as many slots as headers", {2, 3, 2, 4096, 0, false}, shifted);
  found("a lag that leaves no slot to publish", shape,
        {plan(Op::kAllReduce, 4096 * 8, published(cpu::staged_oneshot_all_reduce))});
  found("a flag before its payload", shape, calls, Fault::kFlagBeforePayload);
  found("a flag without release", shape, calls, Fault::kFlagWithoutRelease);
  found("a wait without acquire", shape, calls, Fault::kWaitWithoutAcquire);
  found("a slot released before it is read", shape, calls, Fault::kReleaseBeforeRead);
  found("a release that lets reads pass", shape, calls, Fault::kReleaseOrdersNoReads);

  const auto hangs = [](const char* what, const Events& events, Fault fault) {
    std::size_t states = 0;
    const std::string seen = ending_fault(record({3, 2, 1}, chain(4096, 3, 2)), events, fault, states);
    require(seen == "stuck", concat("unseen: ", what));
    std::printf("planted: %s: %s\n", what, seen.c_str());
  };
  hangs("an abort that is not looked at", {0, false, false}, Fault::kAbortIgnored);
  hangs("a death that is not noticed", {-1, false, true}, Fault::kDeadUnnoticed);
  hangs("an abort not passed on, of one who dies telling it", {2, false, true}, Fault::kAbortNotPassedOn);
}

}  // namespace
}  // namespace ringcomm::test

int main(int argc, char** argv) {
  using namespace ringcomm::test;
  const bool quick = argc > 1 && !std::strcmp(argv[1], "quick");
  explore_worlds(quick);
  order_large_worlds(quick);
  message_worlds(quick);
  end_worlds(quick);
  find_planted_faults();
  std::printf("cpu_link_model_test passed\n");
}

// all_gather, broadcast, gather, scatter, all_to_all and barrier over several hosts.
#include "hierarchy/collectives.h"

namespace ringcomm::hierarchy {

void Collectives::all_gather(const Scope& scope) {
  const Call& call = scope.call;
  const Parts output = output_parts(call);
  const int here = topology_.local_world_size();
  agree(scope, partners(scope.schedule, part_rail_ranks()));
  copy(scope, call.input, output.data(topology_.rank()), output.count(topology_.rank()));

  std::vector<Rail> rails;
  for (int l = topology_.local_rank(); l < topology_.rails(); l += here) {
    std::vector<Part> of_host;
    for (int h = 0; h < topology_.num_hosts(); ++h) {
      const int rank = l < topology_.num_ranks(h) ? topology_.ranks(h)[l] : -1;
      of_host.push_back(rank < 0 ? Part{nullptr, 0} : Part{output.data(rank), output.count(rank)});
    }
    Rail rail{l, part_rail_ranks(l), scope.schedule, false, true, scope.op, 1, scope.types, {}, {}};
    rail.results = part_chunks(scope.schedule, of_host, scope.element);
    rails.push_back(std::move(rail));
  }
  run_rails(scope, rails, scratch(scratch_for(rails)));
  if (here == 1) return;

  std::vector<Call> calls;
  for (int h = 0; h < topology_.num_hosts(); ++h)
    for (int first = 0; first < topology_.num_ranks(h); first += here) {
      Call gather = local_call(scope, Op::kAllGather);
      gather.root = scope.call.root;
      gather.output_parts.resize(here);
      for (int i = 0; i < here && first + i < topology_.num_ranks(h); ++i) {
        const int rank = topology_.ranks(h)[first + i];
        gather.output_parts[i] = {output.data(rank), output.count(rank)};
      }
      const Part& mine = gather.output_parts[topology_.local_rank()];
      gather.input = mine.data;
      gather.count = mine.count;
      calls.push_back(std::move(gather));
    }
  run_inside(calls);
}

// On the root's host every rank gets the complete message and sends its rails on; on the other hosts the rails are
// gathered.
void Collectives::broadcast(const Scope& scope) {
  const Call& call = scope.call;
  const int here = topology_.local_world_size();
  const int root_host = topology_.host_of(call.root);
  const bool with_root = root_host == topology_.host(), is_root = call.root == topology_.rank();
  const Cut cut(topology_, call.count, scope.element);
  agree(scope, partners(InterHostSchedule::kRing, cut.rail_ranks()));
  char* const data = at(is_root ? call.input : call.output, 0, scope.element);
  if (is_root && call.output) copy(scope, call.input, call.output, call.count);
  if (with_root && here > 1) {
    Call inside = local_call(scope, Op::kBroadcast);
    inside.root = topology_.local_of(call.root);
    inside.input = inside.output = data;
    inside.count = call.count;
    run_inside({inside});
  }
  std::vector<RailPlans> lists;
  for (int l = cut.first(); l < cut.last(); ++l) {
    const Slice rail = cut.rail(l);
    const std::size_t slice = slice_elements(rail.count, 1, scope.element);
    const Chunks chunks = Chunks::whole(at(data, rail.offset, scope.element), rail.count, 1, slice, scope.element);
    lists.push_back({l, chunks.windows(), 2, 0, [=, rail_ranks = cut.rail_ranks(l)](std::size_t window, char*) {
                       const Part part = chunks.at(0, window);
                       return build_chain(topology_, rail_ranks, root_host, part.data, part.count * scope.element);
                     }});
  }
  run_plans(*local_, *transport_, lists, nullptr, scope.limit, call.stream);
  if (!with_root) gather_inside(scope, cut, data);
}

// gather, scatter and all_to_all: every part goes directly to its destination.
void Collectives::exchange(const Scope& scope) {
  const Call& call = scope.call;
  const int me = topology_.rank(), world_size = topology_.world_size(), here = topology_.local_world_size();
  const Parts in = input_parts(call), out = output_parts(call);
  const bool rooted_call = call.op != Op::kAllToAll, is_root = rooted_call && call.root == me;
  // The part for a rank, and the part from a rank.
  const auto for_rank = [&](int rank) -> Part {
    if (call.op == Op::kGather) return rank == call.root ? Part{const_cast<void*>(call.input), call.count} : Part{};
    if (call.op == Op::kScatter && !is_root) return {};
    return {in.data(rank), in.count(rank)};
  };
  const auto from_rank = [&](int rank) -> Part {
    if (call.op == Op::kScatter) return rank == call.root ? Part{call.output, call.count} : Part{};
    if (call.op == Op::kGather && !is_root) return {};
    return {out.data(rank), out.count(rank)};
  };
  std::vector<int> peers;
  for (int r = 0; r < world_size; ++r)
    if (topology_.host_of(r) != topology_.host() && (!rooted_call || is_root || r == call.root)) peers.push_back(r);
  agree(scope, peers);

  std::vector<Part> sends, recvs;
  std::size_t nbytes = 0;
  for (int r = 0; r < world_size; ++r) {
    sends.push_back(for_rank(r));
    recvs.push_back(from_rank(r));
    nbytes += sends[r].count * scope.element;
  }
  if (call.op == Op::kAllToAll && call.input && call.input == call.output) {  // in place: output overwrites input
    char* memory = scratch(nbytes);
    for (Part& part : sends) {
      copy(scope, part.data, memory, part.count);
      part.data = memory;
      memory += part.count * scope.element;
    }
  }
  ExchangeRound round;
  for (const int peer : peers) {
    if (sends[peer].count) round.messages.sends.push_back({peer, sends[peer].data, sends[peer].count * scope.element});
    if (recvs[peer].count) round.messages.recvs.push_back({peer, recvs[peer].data, recvs[peer].count * scope.element});
  }
  run_round(scope, std::move(round));
  if (rooted_call && topology_.host_of(call.root) != topology_.host()) return;
  if (here == 1) return copy(scope, sends[me].data, recvs[me].data, recvs[me].count);
  Call inside = local_call(scope, Op::kAllToAll);
  inside.root = call.root;
  for (const int rank : topology_.ranks(topology_.host())) {
    inside.input_parts.push_back(sends[rank]);
    inside.output_parts.push_back(recvs[rank]);
  }
  run_inside({inside});
}

// A barrier inside the host, then between the hosts' first ranks in log2 rounds, then inside again. Source: Hensgen,
// Finkel, Manber 1988 (dissemination).
void Collectives::barrier(const Scope& scope) {
  const int hosts = topology_.num_hosts(), me = topology_.host();
  local_->run(local_call(scope, Op::kBarrier));
  if (topology_.local_rank() == 0) {
    const auto first_of = [&](int host) { return topology_.ranks(host)[0]; };
    ExchangePlan plan;
    std::vector<int> peers;
    char* memory = scratch(2 * 32);
    for (int far = 1; far < hosts; far *= 2) {
      const int next = me + far < hosts ? me + far : me + far - hosts, prev = me >= far ? me - far : me - far + hosts;
      ExchangeRound round;
      round.messages.sends.push_back({first_of(next), memory++, 1});
      round.messages.recvs.push_back({first_of(prev), memory++, 1});
      plan.push_back(std::move(round));
      for (const int host : {next, prev}) peers.push_back(first_of(host));
    }
    std::sort(peers.begin(), peers.end());
    peers.erase(std::unique(peers.begin(), peers.end()), peers.end());
    agree(scope, peers);
    const int rounds = static_cast<int>(plan.size());
    const RailPlans once{0, 1, rounds, 0, [&](std::size_t, char*) { return plan; }};
    run_plans(*local_, *transport_, {once}, nullptr, scope.limit, scope.call.stream);
  } else {
    agree(scope, {});
  }
  local_->run(local_call(scope, Op::kBarrier));
}

}  // namespace ringcomm::hierarchy

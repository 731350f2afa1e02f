// The collectives of one rank over several hosts: inside the host through its engine, between hosts through the
// transport.
#pragma once

#include "core/algorithm_counts.h"
#include "hierarchy/options.h"
#include "hierarchy/scope.h"

namespace ringcomm::hierarchy {

class Collectives {
 public:
  Collectives(Topology topology, std::shared_ptr<Engine> local, std::shared_ptr<Transport> transport, Options options);
  ~Collectives();

  const Topology& topology() const { return topology_; }
  const Options& options() const { return options_; }
  std::uint64_t calls() const { return calls_; }
  // Runs one call at a time, in the order of the calls. Throws Error and TransportFailure.
  void run(const Call& call, TransportClock::time_point limit);
  // See Engine::count_algorithms: counts the schedules between hosts.
  void count_algorithms(std::shared_ptr<Flag> counts) { algorithm_counts_ = std::move(counts); }
  // Returns one sentence about how the calls of this rank and a peer differ.
  std::string difference(int peer, const std::string& mine, const std::string& theirs) const;

 private:
  void note_algorithm(const Scope& scope, Algorithm used) const;
  void all_reduce(const Scope& scope);
  bool fits_signature(const Scope& scope) const;
  void all_reduce_at_once(const Scope& scope);
  void reduce(const Scope& scope);
  void reduce_scatter(const Scope& scope);
  void all_gather(const Scope& scope);
  void broadcast(const Scope& scope);
  void exchange(const Scope& scope);  // gather, scatter and all_to_all
  void barrier(const Scope& scope);

  // Exchanges signatures with the peers, and sends `payload` to those that are the first ranks of their hosts; returns
  // the peers' payloads where the transport supports that.
  std::vector<std::string> agree(const Scope& scope, const std::vector<int>& peers, const std::string& payload = {});
  std::vector<int> partners(InterHostSchedule schedule, const std::vector<std::vector<int>>& rail_ranks) const;
  void run_inside(const std::vector<Call>& calls);
  Call local_call(const Scope& scope, Op op) const;
  void reduce_inside(const Scope& scope, const Cut& cut, const char* input, char* sums);
  void collect(const Scope& scope, const Cut& cut, char* results, char* output);
  void scatter_sums(const Scope& scope, const Parts& input, std::size_t begin, std::size_t wave);
  std::vector<Rail> rails_of(const Scope& scope, const Cut& cut, char* sums, char* results) const;
  std::vector<int> part_rail_ranks(int rail) const;
  std::vector<std::vector<int>> part_rail_ranks() const;
  Chunks by_chunk(InterHostSchedule schedule, const std::vector<Part>& of_host, std::size_t slice,
                  std::size_t element) const;
  Chunks part_chunks(InterHostSchedule schedule, const std::vector<Part>& of_host, std::size_t element) const;
  void widen(const Scope& scope, const void* source, void* target, std::size_t count);
  void gather_inside(const Scope& scope, const Cut& cut, char* data);
  void copy(const Scope& scope, const void* source, void* target, std::size_t count);
  RailPlans plans_of(const Scope& scope, const Rail& rail) const;
  void run_rails(const Scope& scope, const std::vector<Rail>& rails, char* scratch);
  void run_round(const Scope& scope, ExchangeRound round);
  // For a message of `count` elements in `chunks` chunks.
  std::size_t slice_elements(std::size_t count, int chunks, std::size_t element) const;
  std::size_t wave_elements(const Scope& scope, std::size_t count, int parts) const;
  char* scratch(std::size_t nbytes);

  const Topology topology_;
  const std::shared_ptr<Engine> local_;
  const std::shared_ptr<Transport> transport_;
  const Options options_;
  char* scratch_ = nullptr;
  std::size_t scratch_bytes_ = 0;
  std::uint64_t calls_ = 0;
  std::uint64_t history_ = 0;
  std::shared_ptr<Flag> algorithm_counts_;
};

inline std::size_t scratch_for(const std::vector<Rail>& rails) {
  std::size_t nbytes = 0;
  for (const Rail& rail : rails) nbytes += kSlots * scratch_bytes(rail);
  return nbytes;
}

}  // namespace ringcomm::hierarchy

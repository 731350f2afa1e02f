#include "hierarchy/nccl/communicator.h"

#include <sched.h>
#include <unistd.h>

#include <cstring>
#include <set>

#include "core/error.h"

namespace ringcomm::nccl {

namespace {

// Polls `done` until it returns true. Returns false if it does not within `limit`.
template <typename Done>
bool poll_until(TransportClock::time_point limit, const Done& done) {
  constexpr int kYields = 100;
  for (int looks = 0; !done(); ++looks) {
    if (looks < kYields) {
      sched_yield();
      continue;
    }
    if (TransportClock::now() >= limit) return false;
    usleep(50);
  }
  return true;
}

std::string ranks_of(const std::vector<Message>& messages) {
  std::set<int> ranks;
  for (const Message& message : messages) ranks.insert(message.peer);
  std::string text;
  std::size_t left = ranks.size();
  for (const int rank : ranks)
    text += concat(text.empty() ? (left > 1 ? "ranks " : "rank ") : left == 1 ? " and " : ", ", rank), --left;
  return text;
}

}  // namespace

int only_peer(const Round& round) {
  std::set<int> peers;
  for (const Message& message : round.sends) peers.insert(message.peer);
  for (const Message& message : round.recvs) peers.insert(message.peer);
  return peers.size() == 1 ? *peers.begin() : -1;
}

std::string text_of(const Round& round) {
  const auto many = [](std::size_t count) { return concat(count, count == 1 ? " message" : " messages"); };
  if (round.recvs.empty()) return concat(many(round.sends.size()), " to ", ranks_of(round.sends));
  if (round.sends.empty()) return concat(many(round.recvs.size()), " from ", ranks_of(round.recvs));
  return concat(many(round.sends.size()), " to ", ranks_of(round.sends), ", ", round.recvs.size(), " from ",
                ranks_of(round.recvs));
}

Communicator::Communicator(const Library& library, const AbortState& abort_state, const Place& place,
                           const std::string& id, TransportClock::time_point limit)
    : library_(library), abort_state_(abort_state), place_(place) {
  UniqueId unique{};
  if (id.size() != sizeof unique.bytes)
    fail(ErrorCode::kInvalid, "NCCL: rank ", place.rank, " expected an id of ", sizeof unique.bytes, " bytes, got ",
         id.size(), "; every rank passes what nccl_unique_id gave to one of them");
  std::memcpy(unique.bytes, id.data(), sizeof unique.bytes);
  const DeviceScope on(place.device, place.rank);
  Config config;
  Result result = library.init_rank(&comm_, place.world_size, unique, place.rank, &config);
  const bool came = poll_until(limit, [&] {
    if (result == kInProgress && comm_) result = state();
    return result != kInProgress;
  });
  if (came && result == kSuccess) return;
  const std::string why = came ? library.explain(result, comm_) : "";
  abort();
  if (!came)
    fail(ErrorCode::kTimeout, "ncclCommInitRankConfig: rank ", place.rank, " expected all ", place.world_size,
         " ranks to come, got no end within the limit; look for a rank that failed, and at the network between the "
         "hosts (NCCL_SOCKET_IFNAME, NCCL_DEBUG=INFO)");
  fail(ErrorCode::kSystem, "ncclCommInitRankConfig: rank ", place.rank, " expected success, got ", why,
       result == kInvalidUsage ? "; several ranks on one GPU need NCCL 2.30.3 or newer and NCCL_MULTI_RANK_GPU_ENABLE=1"
                               : "; see NCCL_SOCKET_IFNAME, and NCCL_DEBUG=INFO for more");
}

Communicator::~Communicator() {
  if (!process_is_ending()) abort();
}

void Communicator::lose(const char* call, int peer, Result result) const {
  throw TransportFailure{peer, false, concat(call, ": ", library_.explain(result, comm_))};
}

Result Communicator::state() {
  Result error = kSuccess;
  const Result result = library_.get_async_error(comm_, &error);
  return result == kSuccess ? error : result;
}

void Communicator::begin(const Round& round, cudaStream_t stream) {
  const std::lock_guard<std::mutex> lock(mutex_);
  if (!comm_ || abort_state_.ended()) throw TransportFailure{-1, false, "the communicator of NCCL is closed"};
  const auto must = [&](const char* call, int peer, Result result) {
    if (result == kSuccess || result == kInProgress) return;
    library_.group_end();  // closes the group, whose calls fail as well
    lose(call, peer, result);
  };
  if (const Result result = library_.group_start()) lose("ncclGroupStart", -1, result);
  for (const Message& m : round.sends)
    if (m.nbytes) must("ncclSend", m.peer, library_.send(m.data, m.nbytes, kUint8, m.peer, comm_, stream));
  for (const Message& m : round.recvs)
    if (m.nbytes) must("ncclRecv", m.peer, library_.recv(m.data, m.nbytes, kUint8, m.peer, comm_, stream));
  const Result result = library_.group_end();
  if (result != kSuccess && result != kInProgress) lose("ncclGroupEnd", only_peer(round), result);
}

bool Communicator::settled(const Round& round) {
  const std::lock_guard<std::mutex> lock(mutex_);
  if (!comm_ || abort_state_.ended()) throw TransportFailure{-1, false, "the communicator of NCCL was aborted"};
  const Result now = state();
  if (now == kInProgress) return false;
  if (now != kSuccess) lose("ncclGroupEnd", only_peer(round), now);
  return true;
}

void Communicator::group(const Round& round, cudaStream_t stream, TransportClock::time_point limit) {
  const std::lock_guard<std::mutex> lock(turn_);
  begin(round, stream);
  if (!poll_until(limit, [&] { return settled(round); }))
    throw TransportFailure{only_peer(round), true, concat("ncclGroupEnd did not end: ", text_of(round))};
}

std::optional<TransportFailure> Communicator::trouble() {
  const std::unique_lock<std::mutex> lock(mutex_, std::try_to_lock);
  if (!lock || !comm_) return std::nullopt;
  const Result now = state();
  if (now == kSuccess || now == kInProgress) return std::nullopt;
  return TransportFailure{-1, false, concat("NCCL found ", library_.explain(now, comm_))};
}

bool Communicator::close(TransportClock::time_point limit) {
  const std::lock_guard<std::mutex> lock(mutex_);
  if (!comm_) return true;
  Result result = library_.finalize(comm_);
  const bool ended = poll_until(limit, [&] {
    if (result == kInProgress) result = state();
    return result != kInProgress || abort_state_.ended();
  });
  if (!ended || result != kSuccess) return false;
  library_.destroy(comm_);
  comm_ = nullptr;
  return true;
}

void Communicator::abort() {
  const std::lock_guard<std::mutex> lock(mutex_);
  if (comm_) library_.abort(comm_);
  comm_ = nullptr;
}

}  // namespace ringcomm::nccl

// A libnccl.so.2 for tests: ranks are threads of one process, and transfers are work on the streams of the emulated
// GPU. It has no buffers of its own, so it waits wherever NCCL may wait, and it says where it is used in a way that
// NCCL does not allow (`fake_nccl_violations`):
//   - a communicator in use by two threads at once, after its end, or while its last call is still in progress;
//   - sends and receives of a pair that differ in size; a group on several streams; a peer that does not exist.
// As with NCCL's non-blocking communicators, a group is enqueued some time after ncclGroupEnd, and for the first group
// with a peer not before that peer has come to one with this rank.
//
// Its emulator is that of the program which loads it.
#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <sstream>
#include <string>
#include <utility>
#include <vector>

#include "gpu.h"

namespace fake {

using namespace ringcomm::emulator;

enum Result {
  kSuccess = 0,
  kInternalError = 3,
  kInvalidArgument = 4,
  kInvalidUsage = 5,
  kRemoteError = 6,
  kInProgress = 7,
};
struct UniqueId {
  char bytes[128];
};
struct Setup {
  std::size_t nbytes;
  unsigned magic, version;
  int blocking;
};

struct World;
struct Comm;
struct Group;

struct Transfer {
  Comm* comm;
  bool sends;
  char* data;
  std::size_t nbytes;
  int peer;
  cudaStream_t stream;
  std::weak_ptr<Group> group = {};  // alive while it is waiting or going
};
// What one ncclGroupEnd enqueues for one communicator.
struct Group {
  Comm* comm = nullptr;
  std::vector<std::shared_ptr<Transfer>> transfers;
  std::size_t left = 0;
  std::shared_ptr<Point> end = std::make_shared<Point>();
  char sync = 0;
};
struct Comm {
  World* world;
  int rank, device;
  Result error = kSuccess;
  std::shared_ptr<Group> waiting;             // for connections
  std::vector<std::shared_ptr<Group>> going;  // on the device
  bool finalized = false, gone = false;
  std::atomic<int> users{0};
};
// The communicators of one id.
struct World {
  int number, ranks = 0;
  std::vector<Comm*> comms;
  std::set<std::pair<int, int>> reached;                                              // (rank, peer): has come to peer
  std::map<std::pair<int, int>, std::deque<std::shared_ptr<Transfer>>> sends, recvs;  // by (from, to), begun
  bool complete() const { return std::count(comms.begin(), comms.end(), nullptr) == 0; }
};

std::mutex& mutex = *new std::mutex;  // of all that follows; never destroyed, as the device's thread is never
auto& worlds = *new std::deque<World>;
auto& comms = *new std::deque<Comm>;
auto& calls = *new std::vector<std::string>;
auto& violations = *new std::vector<std::string>;
auto& settings = *new std::map<std::string, long>;
std::string& last_error = *new std::string;

thread_local int depth = 0;
thread_local std::vector<std::shared_ptr<Transfer>> open_transfers;
thread_local Result open_error = kSuccess;  // of a call in the open group: the whole group fails

long setting(const std::string& key, long otherwise) {
  const auto it = settings.find(key);
  return it == settings.end() ? otherwise : it->second;
}
// The error that a test has asked for: one time.
Result asked_for(const std::string& key, int rank) {
  const auto it = settings.find(key);
  if (it == settings.end() || setting(key + "_rank", rank) != rank) return kSuccess;
  const auto result = static_cast<Result>(it->second);
  settings.erase(it);
  last_error = key + " was asked for by a test";
  return result;
}
std::string who(const Comm* comm) {
  return "communicator " + std::to_string(comm->world->number) + " rank " + std::to_string(comm->rank);
}
Result violate(const Comm* comm, const std::string& what) {
  violations.push_back((comm ? who(comm) + ": " : std::string()) + what);
  last_error = what;
  return kInvalidUsage;
}

// Uses of a communicator by one thread at a time.
class Use {
 public:
  Use(Comm* comm, const char* call) : comm_(comm) {
    if (comm_->users.fetch_add(1) != 0) {
      const std::lock_guard<std::mutex> lock(mutex);
      violate(comm_, std::string(call) + " while another thread uses the communicator");
    }
  }
  ~Use() { comm_->users.fetch_sub(1); }

 private:
  Comm* const comm_;
};

Result check_ready(Comm* comm, const char* call) {
  if (comm->gone) return violate(comm, std::string(call) + " after the end of the communicator");
  if (comm->error == kInProgress) return violate(comm, std::string(call) + " while the last call is in progress");
  return comm->error;
}

// ---- the device -----------------------------------------------------------------------------------------------------

void complete(const std::shared_ptr<Group>& group) {
  auto& going = group->comm->going;
  going.erase(std::remove(going.begin(), going.end(), group), going.end());
  release(&group->end->sync);
  const std::lock_guard<std::mutex> lock(Gpu::get().mutex);
  group->end->reached = true;
}
void end_one(const std::shared_ptr<Transfer>& transfer) {
  const auto group = transfer->group.lock();
  if (--group->left == 0) complete(group);
}

void match(World& world, std::pair<int, int> pair) {
  auto &sends = world.sends[pair], &recvs = world.recvs[pair];
  while (!sends.empty() && !recvs.empty()) {
    const auto from = sends.front(), to = recvs.front();
    if (from->nbytes != to->nbytes) {
      violate(from->comm, "sends " + std::to_string(from->nbytes) + " bytes to rank " + std::to_string(pair.second) +
                              ", which expects " + std::to_string(to->nbytes));
      from->comm->error = to->comm->error = kInvalidUsage;
      return;
    }
    acquire(&from->group.lock()->sync);
    acquire(&to->group.lock()->sync);
    std::memcpy(to->data, from->data, from->nbytes);
    sends.pop_front();
    recvs.pop_front();
    end_one(from);
    end_one(to);
  }
}

// On the device's thread, when the stream has come to the group.
void arrive(const std::shared_ptr<Group>& group) {
  const std::lock_guard<std::mutex> lock(mutex);
  release(&group->sync);
  if (group->comm->gone) return;
  World& world = *group->comm->world;
  std::set<std::pair<int, int>> pairs;
  for (const auto& transfer : group->transfers) {
    const int rank = group->comm->rank;
    const auto pair = transfer->sends ? std::make_pair(rank, transfer->peer) : std::make_pair(transfer->peer, rank);
    (transfer->sends ? world.sends : world.recvs)[pair].push_back(transfer);
    pairs.insert(pair);
  }
  for (const auto& pair : pairs) match(world, pair);
}

void on_stream(Comm* comm, cudaStream_t handle, const std::vector<Work>& work) {
  Gpu& gpu = Gpu::get();
  const std::lock_guard<std::mutex> lock(gpu.mutex);
  Stream* const stream = gpu.resolve(handle, comm->device);
  for (const Work& each : work) gpu.enqueue(stream, each);
}
Work call_of(std::function<void()> call) {
  Work work{Kind::kCall};
  work.call = std::move(call);
  return work;
}

// Enqueues what waited for connections, once they are there.
void progress(Comm* comm) {
  if (!comm->waiting || comm->error != kInProgress) return;
  for (const auto& transfer : comm->waiting->transfers)
    if (comm->world->reached.count({transfer->peer, comm->rank}) == 0) return;
  const std::shared_ptr<Group> group = std::move(comm->waiting);
  comm->going.push_back(group);
  comm->error = kSuccess;
  Work wait{Kind::kWait};
  wait.point = group->end;
  on_stream(comm, group->transfers[0]->stream, {call_of([group] { arrive(group); }), wait});
}

Result enqueue(Comm* comm, std::vector<std::shared_ptr<Transfer>> transfers) {
  const auto group = std::make_shared<Group>();
  std::ostringstream line;
  line << who(comm) << ':';
  for (const auto& transfer : transfers) {
    transfer->group = group;
    comm->world->reached.insert({comm->rank, transfer->peer});
    line << (transfer->sends ? " send " : " recv ") << transfer->peer << ' ' << transfer->nbytes << ',';
    if (transfer->stream != transfers[0]->stream) return violate(comm, "a group on several streams");
  }
  calls.push_back(line.str());
  group->comm = comm;
  group->left = transfers.size();
  group->transfers = std::move(transfers);
  comm->waiting = group;
  return comm->error = kInProgress;
}

void let_go(Comm* comm, bool ends_kernels) {
  comm->gone = true;
  comm->waiting = nullptr;
  World& world = *comm->world;
  const auto is_mine = [&](const std::shared_ptr<Transfer>& transfer) { return transfer->comm == comm; };
  for (auto* queues : {&world.sends, &world.recvs})
    for (auto& [pair, queue] : *queues) queue.erase(std::remove_if(queue.begin(), queue.end(), is_mine), queue.end());
  if (!ends_kernels) return;
  const auto going = comm->going;
  for (const auto& group : going) {
    complete(group);
    on_stream(comm, group->transfers[0]->stream, {call_of([] {})});  // the device looks again
  }
}

}  // namespace fake

// ---- what NCCL has --------------------------------------------------------------------------------------------------

using namespace fake;
#define EXPORT extern "C" __attribute__((visibility("default")))

EXPORT Result ncclGetVersion(int* version) {
  const std::lock_guard<std::mutex> lock(mutex);
  const char* const told = std::getenv("FAKE_NCCL_VERSION");
  *version = static_cast<int>(setting("version", told ? std::atol(told) : 23007));
  return kSuccess;
}

EXPORT Result ncclGetUniqueId(UniqueId* id) {
  const std::lock_guard<std::mutex> lock(mutex);
  if (const Result result = asked_for("id_error", -1)) return result;
  std::memset(id, 0, sizeof *id);
  const int number = static_cast<int>(worlds.size());
  std::memcpy(id->bytes, &number, sizeof number);
  worlds.emplace_back().number = number;
  return kSuccess;
}

EXPORT Result ncclCommInitRankConfig(Comm** result, int ranks, UniqueId id, int rank, Setup* config) {
  const std::lock_guard<std::mutex> lock(mutex);
  *result = nullptr;
  int number = 0;
  std::memcpy(&number, id.bytes, sizeof number);
  if (config->magic != 0xcafebeef || config->nbytes < sizeof(Setup)) return violate(nullptr, "not a config");
  if (config->blocking != 0) return violate(nullptr, "this fake is non-blocking");
  if (number < 0 || number >= static_cast<int>(worlds.size())) return violate(nullptr, "an id that nobody made");
  if (const Result error = asked_for("init_error", rank)) return error;
  World& world = worlds[static_cast<std::size_t>(number)];
  if (world.comms.empty()) world.comms.resize(static_cast<std::size_t>(ranks), nullptr), world.ranks = ranks;
  if (world.ranks != ranks || rank < 0 || rank >= ranks || world.comms[static_cast<std::size_t>(rank)])
    return violate(nullptr, "rank " + std::to_string(rank) + " of " + std::to_string(ranks) + " comes twice");
  Comm& comm = comms.emplace_back();
  comm.world = &world;
  comm.rank = rank;
  comm.device = current_device();
  comm.error = kInProgress;
  world.comms[static_cast<std::size_t>(rank)] = &comm;
  *result = &comm;
  return kInProgress;
}

EXPORT Result ncclCommGetAsyncError(Comm* comm, Result* error) {
  const std::lock_guard<std::mutex> lock(mutex);
  if (comm->gone) return violate(comm, "ncclCommGetAsyncError after the end of the communicator");
  if (const Result injected = asked_for("async_error", comm->rank)) comm->error = injected;
  if (comm->error == kInProgress) {
    if (comm->waiting)
      progress(comm);
    else if (comm->finalized ? comm->going.empty() : comm->world->complete())
      comm->error = kSuccess;
  }
  *error = comm->error;
  return kSuccess;
}

EXPORT Result ncclCommFinalize(Comm* comm) {
  const Use use(comm, "ncclCommFinalize");
  const std::lock_guard<std::mutex> lock(mutex);
  if (const Result result = check_ready(comm, "ncclCommFinalize")) return result;
  calls.push_back(who(comm) + ": finalize");
  comm->finalized = true;
  return comm->error = kInProgress;
}

EXPORT Result ncclCommDestroy(Comm* comm) {
  const Use use(comm, "ncclCommDestroy");
  const std::lock_guard<std::mutex> lock(mutex);
  if (const Result result = check_ready(comm, "ncclCommDestroy")) return result;
  if (!comm->finalized) return violate(comm, "ncclCommDestroy before ncclCommFinalize");
  let_go(comm, false);
  return kSuccess;
}

EXPORT Result ncclCommAbort(Comm* comm) {
  const std::lock_guard<std::mutex> lock(mutex);
  if (comm->gone) return violate(comm, "ncclCommAbort after the end of the communicator");
  calls.push_back(who(comm) + ": abort");
  let_go(comm, true);
  return kSuccess;
}

EXPORT const char* ncclGetErrorString(Result result) {
  switch (result) {
    case kSuccess:
      return "no error";
    case kInternalError:
      return "internal error";
    case kInvalidArgument:
      return "invalid argument";
    case kInvalidUsage:
      return "invalid usage";
    case kRemoteError:
      return "remote process exited or there was a network error";
    case kInProgress:
      return "NCCL operation in progress";
    default:
      return "unhandled system error";
  }
}
EXPORT const char* ncclGetLastError(Comm*) {
  thread_local std::string mine;
  const std::lock_guard<std::mutex> lock(mutex);
  return (mine = last_error).c_str();
}

EXPORT Result ncclGroupStart() {
  ++depth;
  return kSuccess;
}
EXPORT Result ncclGroupEnd() {
  if (depth == 0) {
    const std::lock_guard<std::mutex> lock(mutex);
    return violate(nullptr, "ncclGroupEnd without ncclGroupStart");
  }
  if (--depth > 0) return kSuccess;
  std::vector<std::shared_ptr<Transfer>> transfers;
  transfers.swap(open_transfers);
  if (const Result error = std::exchange(open_error, kSuccess)) return error;
  const std::lock_guard<std::mutex> lock(mutex);
  std::map<Comm*, std::vector<std::shared_ptr<Transfer>>> by_comm;
  for (auto& transfer : transfers) by_comm[transfer->comm].push_back(std::move(transfer));
  Result result = kSuccess;
  for (auto& [comm, own] : by_comm) {
    if (const Result error = asked_for("group_error", comm->rank)) return error;
    result = enqueue(comm, std::move(own));
    if (result != kInProgress) return result;
  }
  return result;
}

static Result check_transfer(const Transfer& transfer, int type) {
  Comm* const comm = transfer.comm;
  const char* const call = transfer.sends ? "ncclSend" : "ncclRecv";
  const Use use(comm, call);
  const std::lock_guard<std::mutex> lock(mutex);
  if (const Result result = asked_for(transfer.sends ? "send_error" : "recv_error", comm->rank)) return result;
  if (const Result result = check_ready(comm, call)) return result;
  if (type != 1) return violate(comm, std::string(call) + " of a type that is not uint8");
  if (transfer.peer < 0 || transfer.peer >= comm->world->ranks || transfer.peer == comm->rank)
    return violate(comm, "no such peer");
  if (transfer.nbytes == 0 || !transfer.data) return violate(comm, std::string(call) + " of nothing");
  return kSuccess;
}
static Result add(const Transfer& transfer, int type) {
  if (const Result result = check_transfer(transfer, type)) {
    if (depth > 0) open_error = result;
    return result;
  }
  ncclGroupStart();
  open_transfers.push_back(std::make_shared<Transfer>(transfer));
  return ncclGroupEnd();
}
EXPORT Result ncclSend(const void* data, std::size_t count, int type, int peer, Comm* comm, cudaStream_t stream) {
  return add({comm, true, static_cast<char*>(const_cast<void*>(data)), count, peer, stream}, type);
}
EXPORT Result ncclRecv(void* data, std::size_t count, int type, int peer, Comm* comm, cudaStream_t stream) {
  return add({comm, false, static_cast<char*>(data), count, peer, stream}, type);
}

// ---- what tests ask for ---------------------------------------------------------------------------------------------

// version; send_error, recv_error, group_error, async_error, init_error, id_error: the result of the next such call, of
// any rank, or of the one in <error>_rank.
EXPORT void fake_nccl_set(const char* key, long value) {
  const std::lock_guard<std::mutex> lock(mutex);
  settings[key] = value;
}
EXPORT void fake_nccl_reset() {
  const std::lock_guard<std::mutex> lock(mutex);
  settings.clear();
  calls.clear();
  violations.clear();
  last_error.clear();
}
static const char* joined(const std::vector<std::string>& lines) {
  thread_local std::string mine;
  mine.clear();
  for (const std::string& line : lines) mine += line + '\n';
  return mine.c_str();
}
// A line for every group: "communicator 0 rank 1: send 2 64, recv 0 64,"; and for finalize and abort.
EXPORT const char* fake_nccl_calls() {
  const std::lock_guard<std::mutex> lock(mutex);
  return joined(calls);
}
EXPORT const char* fake_nccl_violations() {
  const std::lock_guard<std::mutex> lock(mutex);
  return joined(violations);
}

#include "cuda/buffers.h"

#include <algorithm>
#include <atomic>
#include <cstdio>
#include <cstring>

#if !defined(RINGCOMM_EMULATE)
#include <cuda.h>
#endif

#include "core/error.h"
#include "cuda/runtime.h"

namespace ringcomm::cuda {

namespace {

constexpr Location kStaged{-1, 0, 0};
constexpr std::uint64_t kInUse = ~std::uint64_t{0};  // no call is known that does not use it
constexpr std::uint64_t kCallsBetweenLooks = 64;     // for what is gone, where no new allocation is a reason to look

std::uint32_t bit(int peer) { return 1u << peer; }

// A handle as text: mail has no zeros.
std::string text_of(const MemoryHandle& handle) {
  constexpr char kDigits[] = "0123456789abcdef";
  std::string text;
  const auto* const bytes = reinterpret_cast<const unsigned char*>(&handle);
  for (std::size_t i = 0; i < sizeof handle; ++i) {
    text += kDigits[bytes[i] / 16];
    text += kDigits[bytes[i] % 16];
  }
  return text;
}
bool read_handle(const std::string& text, MemoryHandle& handle) {
  if (text.size() != 2 * sizeof handle || text.find_first_not_of("0123456789abcdef") != std::string::npos) return false;
  auto* const bytes = reinterpret_cast<unsigned char*>(&handle);
  for (std::size_t i = 0; i < sizeof handle; ++i)
    bytes[i] = static_cast<unsigned char>(std::stoul(text.substr(2 * i, 2), nullptr, 16));
  return handle.magic == kMemoryMagic;
}

}  // namespace

#if defined(RINGCOMM_EMULATE)

Allocation allocation_of(const void* data) {
  Allocation found;
  emulator::find_allocation(data, &found.base, &found.nbytes, &found.id);
  return found;
}

#else

Allocation allocation_of(const void* data) {
  static const auto get =
      reinterpret_cast<decltype(&cuPointerGetAttributes)>(driver_function("cuPointerGetAttributes"));
  CUdeviceptr base = 0;
  std::size_t nbytes = 0;
  unsigned long long id = 0;
  int from_cuda_malloc = 0;
  CUpointer_attribute attributes[] = {CU_POINTER_ATTRIBUTE_RANGE_START_ADDR, CU_POINTER_ATTRIBUTE_RANGE_SIZE,
                                      CU_POINTER_ATTRIBUTE_BUFFER_ID, CU_POINTER_ATTRIBUTE_IS_LEGACY_CUDA_IPC_CAPABLE};
  void* values[] = {&base, &nbytes, &id, &from_cuda_malloc};
  if (!get || get(4, attributes, values, reinterpret_cast<CUdeviceptr>(data)) != CUDA_SUCCESS || !from_cuda_malloc)
    return {};
  return {base, nbytes, id};
}

#endif

void say_staged(const char* call, int rank, const std::string& got) {
  static std::atomic<bool> said{false};
  if (said.exchange(true)) return;
  std::fprintf(stderr,
               "ringcomm: %s: rank %d expected a buffer that the peers can reach, got %s, so that it is copied through "
               "staging areas; allocate it with the communicator (comm.empty)\n",
               call, rank, got.c_str());
}

Buffers::Buffers(int rank, int device, std::vector<Peer> peers, std::function<void(int, int, char*)> set)
    : rank_(rank), device_(device), peers_(std::move(peers)), set_(std::move(set)) {}

std::uint32_t Buffers::all_peers() const { return (bit(static_cast<int>(peers_.size())) - 1) & ~bit(rank_); }

void Buffers::attend(Mailbox& mailbox, const char* call) {
  const std::lock_guard<std::mutex> lock(mutex_);
  while (mailbox.receive(0)) continue;
  Mail mail;
  while (mailbox.take(Mail::kOffer, -1, nullptr, mail)) open(mail);
  while (mailbox.take(Mail::kTaken, -1, nullptr, mail)) hear_taken(mail, call);
  while (mailbox.take(Mail::kWithdrawn, -1, nullptr, mail)) hear_withdrawn(mail);
  while (mailbox.take(Mail::kDropped, -1, nullptr, mail)) hear_dropped(mail);
  if (calls_ % kCallsBetweenLooks == 0) withdraw_what_is_gone();
  send(mailbox);
}

void Buffers::called() {
  const std::lock_guard<std::mutex> lock(mutex_);
  ++calls_;
}

// ---- the owner -----------------------------------------------------------------------------------------------------

Location Buffers::locate(const void* data, std::size_t nbytes, bool captured, const char* call) {
  const auto address = reinterpret_cast<std::uint64_t>(data);
  const Allocation allocation = allocation_of(data);
  if (!allocation.holds(address, nbytes)) {
    if (nbytes >= kLeastShown) say_staged(call, rank_, kForeignMemory);
    return kStaged;
  }
  const std::lock_guard<std::mutex> lock(mutex_);
  const auto own = std::find_if(owns_.begin(), owns_.end(),
                                [&](const Own& o) { return o.state != State::kFree && o.allocation == allocation; });
  if (own == owns_.end()) {
    if (nbytes >= kLeastShown) offer(allocation, call);
    return kStaged;
  }
  if (own->state != State::kVisible || calls_ < own->from) return kStaged;
  own->captured = own->captured || captured;
  return {static_cast<std::int32_t>(kMaxArenas + (own - owns_.begin())), 1, address - allocation.base};
}

std::size_t Buffers::num_visible() const {
  const std::lock_guard<std::mutex> lock(mutex_);
  return std::count_if(owns_.begin(), owns_.end(), [](const Own& own) { return own.state == State::kVisible; });
}

Buffers::Own* Buffers::find(const Identity& identity) {
  for (Own& own : owns_)
    if (own.state != State::kFree && own.handle.identity == identity) return &own;
  return nullptr;
}

// The peers hear of it at the next call.
void Buffers::offer(const Allocation& allocation, const char* call) {
  withdraw_what_is_gone();
  const auto own = std::find_if(owns_.begin(), owns_.end(), [](const Own& o) { return o.state == State::kFree; });
  if (own == owns_.end())
    return say_staged(call, rank_, concat("more than ", kMaxBuffers, " allocations in use at a time"));
  own->allocation = allocation;
  own->handle.magic = kMemoryMagic;
  own->handle.kind = HandleKind::kIpc;
  own->handle.identity = random_identity();
  own->handle.address = allocation.base;
  own->handle.nbytes = allocation.nbytes;
  own->open = all_peers();
  const RelaxedCapture relaxed(rank_);
  const cudaError_t status = cudaIpcGetMemHandle(&own->handle.ipc, reinterpret_cast<void*>(allocation.base));
  own->state = status == cudaSuccess ? State::kOffered : State::kRefused;
  if (status == cudaSuccess) return;
  cudaGetLastError();
  say_staged(call, rank_, concat("memory for which cudaIpcGetMemHandle gave \"", cudaGetErrorString(status), "\""));
}

void Buffers::withdraw(Own& own) {
  own.state = State::kWithdrawn;
  own.from = calls_;
  own.told = 0;
  own.open = all_peers();
}

void Buffers::withdraw_what_is_gone() {
  if (looked_ == calls_) return;
  looked_ = calls_;
  for (Own& own : owns_) {
    if (own.state == State::kFree || own.state == State::kWithdrawn || own.captured) continue;
    if (allocation_of(reinterpret_cast<const void*>(own.allocation.base)) == own.allocation) continue;
    if (own.state == State::kRefused)
      own = Own{};
    else
      withdraw(own);
  }
}

void Buffers::hear_taken(const Mail& mail, const char* call) {
  waits_ &= ~bit(mail.from);
  Own* const own = find(mail.subject);
  if (!own || own->state != State::kOffered) return;
  if (mail.code != 0) {
    own->refused = allocation_of(reinterpret_cast<const void*>(own->allocation.base)) == own->allocation;  // not freed
    if (own->refused) say_staged(call, rank_, concat("memory that rank ", mail.from, " could not open"));
    return withdraw(*own);
  }
  own->open &= ~bit(mail.from);
  own->from = std::max(own->from, mail.call);
  if (own->open == 0) own->state = State::kVisible;
}

void Buffers::hear_dropped(const Mail& mail) {
  waits_ &= ~bit(mail.from);
  Own* const own = find(mail.subject);
  if (!own || own->state != State::kWithdrawn) return;
  own->open &= ~bit(mail.from);
  if (own->open != 0) return;
  if (own->refused)
    own->state = State::kRefused;
  else
    *own = Own{};
}

// ---- the peer ------------------------------------------------------------------------------------------------------

void Buffers::open(const Mail& offer) {
  MemoryHandle handle;
  if (!read_handle(offer.text, handle) || offer.code < 0 || offer.code >= kMaxBuffers || offer.from < 0 ||
      offer.from >= static_cast<int>(peers_.size()))
    return;
  Opened opened{offer.from, kMaxArenas + offer.code, offer.subject, nullptr, kInUse};
  try {
    auto* base = reinterpret_cast<char*>(handle.address);
    if (!peers_[offer.from].here) {
      opened.memory = DeviceMemory::open(handle, -1, device_, rank_, offer.from);
      base = opened.memory->data();
    }
    set_(opened.peer, opened.region, base);
  } catch (const Error&) {
    return answer(offer.from, offer.subject, Mail::kTaken, false);
  }
  opened_.push_back(std::move(opened));
  answer(offer.from, offer.subject, Mail::kTaken, true);
}

void Buffers::hear_withdrawn(const Mail& mail) {
  const auto opened =
      std::find_if(opened_.begin(), opened_.end(), [&](const Opened& o) { return o.identity == mail.subject; });
  if (opened == opened_.end()) return answer(mail.from, mail.subject, Mail::kDropped, true);
  opened->until = mail.call;
}

bool Buffers::has_unused() const {
  const std::lock_guard<std::mutex> lock(mutex_);
  return std::any_of(opened_.begin(), opened_.end(), [&](const Opened& o) { return calls_ >= o.until; });
}

// The owner hears of it when it is closed: until then the driver would refuse another mapping of the same address.
void Buffers::close_unused() {
  std::list<Opened> unused;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    for (auto opened = opened_.begin(); opened != opened_.end();) {
      const auto here = opened++;
      if (calls_ < here->until) continue;
      set_(here->peer, here->region, nullptr);
      unused.splice(unused.end(), opened_, here);
    }
  }
  for (Opened& opened : unused) {
    opened.memory.reset();
    const std::lock_guard<std::mutex> lock(mutex_);
    answer(opened.peer, opened.identity, Mail::kDropped, true);
  }
}

// ---- letters -------------------------------------------------------------------------------------------------------

void Buffers::answer(int peer, const Identity& subject, Mail::Kind kind, bool done) {
  Mail mail;
  mail.kind = kind;
  mail.from = rank_;
  mail.subject = subject;
  mail.call = calls_;
  mail.code = done ? 0 : 1;
  answers_.emplace_back(peer, std::move(mail));
}

// A peer that has closed gets no more letters: it counts as one that does not answer.
void Buffers::send(Mailbox& mailbox) {
  const auto arrives = [&](int peer, const Mail& mail) {
    return mailbox.send(peers_[peer].mailbox, mail) != Mailbox::Sent::kFull;
  };
  answers_.erase(std::remove_if(answers_.begin(), answers_.end(),
                                [&](const auto& answer) { return arrives(answer.first, answer.second); }),
                 answers_.end());
  for (int p = 0; p < static_cast<int>(peers_.size()); ++p) {
    if (p == rank_ || waits_ & bit(p)) continue;
    const auto untold = [&](State state) {
      return std::find_if(owns_.begin(), owns_.end(),
                          [&](const Own& o) { return o.state == state && !(o.told & bit(p)); });
    };
    // What is gone first: the driver refuses a mapping of an address that the peer has mapped still.
    auto own = untold(State::kWithdrawn);
    if (own == owns_.end()) own = untold(State::kOffered);
    if (own == owns_.end()) continue;
    Mail mail;
    mail.kind = own->state == State::kOffered ? Mail::kOffer : Mail::kWithdrawn;
    mail.from = rank_;
    mail.code = static_cast<std::int32_t>(own - owns_.begin());
    mail.subject = own->handle.identity;
    mail.call = own->from;
    if (mail.kind == Mail::kOffer) mail.text = text_of(own->handle);
    if (!arrives(p, mail)) continue;
    own->told |= bit(p);
    waits_ |= bit(p);
  }
}

}  // namespace ringcomm::cuda

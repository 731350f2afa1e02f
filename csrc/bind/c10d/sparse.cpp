// all_reduce of sparse tensors on the cpu, such as the gradients of an Embedding(sparse=True): every rank puts its
// values on the union of all ranks' indices, and the ordinary all_reduce combines them. So the bits are those of the
// dense tensors.
#include <algorithm>

#include "bind/c10d/backend.h"

namespace ringcomm {

namespace {

constexpr std::int64_t kMostDims = 64;
constexpr int kFacts = 4;  // numbers before the sizes

// Describes a rank's tensor as a row of numbers: how many indices, then the facts that must be equal on all ranks.
Tensor described(const Tensor& mine) {
  std::vector<std::int64_t> row{mine.indices().size(1), static_cast<std::int64_t>(mine.scalar_type()),
                                mine.sparse_dim(), mine.dim()};
  row.insert(row.end(), mine.sizes().begin(), mine.sizes().end());
  row.resize(kFacts + kMostDims, -1);
  return at::tensor(row, at::kLong).unsqueeze(0);
}

std::string text_of(const Tensor& row) {
  const std::int64_t* const numbers = row.const_data_ptr<std::int64_t>();
  std::string shape;
  for (std::int64_t i = 0; i < std::min(numbers[3], kMostDims); ++i)
    shape += (i == 0 ? "" : ", ") + std::to_string(numbers[kFacts + i]);
  return concat(c10::toString(static_cast<at::ScalarType>(numbers[1])), " of shape [", shape, "] with ", numbers[2],
                " sparse dimensions");
}

}  // namespace

// Returns the concatenated indices of all ranks, of which each may have a different number.
Tensor Backend::gather_indices(const Site& at, const Tensor& mine, std::chrono::milliseconds timeout) {
  const auto gather = [this, timeout](Tensor part) {
    Tensor all = at::empty({size_ * part.size(0), part.size(1)}, part.options());
    _allgather_base(all, part, c10d::AllgatherOptions{timeout, false});
    return all;
  };
  const Tensor rows = gather(described(mine));
  for (int rank = 0; rank < size_; ++rank) {  // the rows are the same on every rank, so all ranks raise
    const std::int64_t dims = rows[rank][3].item<std::int64_t>();
    if (dims > kMostDims)
      at.refuse("UnsupportedError", "expected at most ", kMostDims, " dimensions of a sparse tensor, rank ", rank,
                " passed ", dims, "; reshape it");
    if (!at::equal(rows[rank].slice(0, 1), rows[0].slice(0, 1))) {
      at.refuse("MismatchError", "rank 0 passed ", text_of(rows[0]), ", rank ", rank, " passed ", text_of(rows[rank]),
                "; pass sparse tensors of one shape and type");
    }
  }
  const Tensor counts = rows.select(1, 0);
  const std::int64_t most = counts.max().item<std::int64_t>();
  const Tensor padded = at::constant_pad_nd(mine.indices().t(), {0, 0, 0, most - mine.indices().size(1)});
  Tensors parts = gather(padded.contiguous()).split(std::max<std::int64_t>(most, 1));
  for (std::size_t i = 0; i < parts.size(); ++i) parts[i] = parts[i].narrow(0, 0, counts[i].item<std::int64_t>());
  return at::cat(parts).t();
}

WorkPtr Backend::all_reduce_sparse(Tensors& tensors, const c10d::AllreduceOptions& opts) {
  const Site at = site("ringcomm:sparse_all_reduce");
  if (batches_.find()) {
    at.refuse("InvalidArgumentError", "got a sparse tensor among coalesced calls, expected a strided one; ",
              "call all_reduce for it alone");
  }
  at::RecordFunction span(at::RecordScope::USER_SCOPE);
  open_span(span, at.title, {});
  const at::AutoDispatchBelowADInplaceOrView below_autograd;
  const Tensor mine = tensors[0].coalesce();
  const Tensor indices = gather_indices(at, mine, opts.timeout);
  auto shape = mine.values().sizes().vec();
  shape[0] = indices.size(1);
  const Tensor zeros = at::zeros(shape, mine.values().options());
  const Tensor laid = at::sparse_coo_tensor(at::cat({indices, mine.indices()}, 1), at::cat({zeros, mine.values()}),
                                            mine.sizes(), mine.options())
                          .coalesce();
  Tensors values{laid.values()};
  c10d::AllreduceOptions at_once = opts;
  at_once.asyncOp = false;
  allreduce(values, at_once);
  tensors[0].copy_(laid);
  if (!opts.asyncOp) return nullptr;
  auto future = c10::make_intrusive<c10::ivalue::Future>(c10::ListType::ofTensors());
  future->markCompleted(c10::IValue(tensors));
  return c10d::Work::create_from_future(future);
}

}  // namespace ringcomm

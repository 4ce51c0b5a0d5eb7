#include "layout/cells.h"

#include <algorithm>
#include <cstring>
#include <utility>

namespace baton::layout {
namespace {

constexpr std::size_t kVectorBytes = 16;  // The vectors that every x86-64 and ARM64 processor has.
constexpr std::size_t kLineBytes = 64;

template <typename Word>
constexpr std::size_t kLanes = kVectorBytes / sizeof(Word);

template <typename Word>
using Vector __attribute__((vector_size(kVectorBytes))) = Word;

template <typename Word>
Vector<Word> load(const std::uint8_t* at) {
  Vector<Word> value;
  std::memcpy(&value, at, sizeof value);
  return value;
}

template <typename Word>
void store(std::uint8_t* at, Vector<Word> value) {
  std::memcpy(at, &value, sizeof value);
}

// zip: a0 b0 a1 b1 …, its first or its second half. unzip: all even or all odd words of a, then of b.
template <typename Word, int kHalf, std::size_t... I>
Vector<Word> zip(Vector<Word> a, Vector<Word> b, std::index_sequence<I...>) {
  constexpr int kN = sizeof...(I);
  return __builtin_shufflevector(a, b, (static_cast<int>(I) / 2 + kHalf * kN / 2 + (I % 2 == 1 ? kN : 0))...);
}

template <typename Word, int kHalf>
Vector<Word> zip(Vector<Word> a, Vector<Word> b) {
  return zip<Word, kHalf>(a, b, std::make_index_sequence<kLanes<Word>>());
}

template <typename Word, int kOdd, std::size_t... I>
Vector<Word> unzip(Vector<Word> a, Vector<Word> b, std::index_sequence<I...>) {
  return __builtin_shufflevector(a, b, (2 * static_cast<int>(I) + kOdd)...);
}

template <typename Word, int kOdd>
Vector<Word> unzip(Vector<Word> a, Vector<Word> b) {
  return unzip<Word, kOdd>(a, b, std::make_index_sequence<kLanes<Word>>());
}

// Transposes a square. Zipping row i with row i + n / 2 moves the words of every column a power of two closer together;
// after log2(n) rounds they stand side by side.
template <typename Word>
void transpose(Vector<Word> (&square)[kLanes<Word>]) {
  constexpr std::size_t kN = kLanes<Word>;
  for (std::size_t step = 1; step < kN; step *= 2) {
    Vector<Word> next[kN];
    for (std::size_t i = 0; i < kN / 2; ++i) {
      next[2 * i] = zip<Word, 0>(square[i], square[i + kN / 2]);
      next[2 * i + 1] = zip<Word, 1>(square[i], square[i + kN / 2]);
    }
    std::copy_n(next, kN, square);
  }
}

template <bool kPack>
using Pointer = std::conditional_t<kPack, std::uint8_t*, const std::uint8_t*>;

// Moves `bytes` from the rows' side to the cells' side, or back.
template <bool kPack>
void move(Pointer<kPack> cell, Pointer<!kPack> row, std::size_t bytes) {
  if constexpr (kPack) {
    std::memcpy(cell, row, bytes);
  } else {
    std::memcpy(row, cell, bytes);
  }
}

template <bool kPack>
using Rows = std::span<const Pointer<!kPack>>;

// Word w of row t lies at cells + w * stride + t * sizeof(Word).
template <typename Word, bool kPack>
void words(Pointer<kPack> cells, std::uint64_t stride, Rows<kPack> rows, std::size_t first_word, std::size_t end_word) {
  for (std::size_t t = 0; t < rows.size(); ++t) {
    for (std::size_t w = first_word; w < end_word; ++w) {
      move<kPack>(cells + w * stride + t * sizeof(Word), rows[t] + w * sizeof(Word), sizeof(Word));
    }
  }
}

template <typename Word, bool kPack>
void square(Pointer<kPack> cells, std::uint64_t stride, Rows<kPack> rows, std::size_t offset) {
  Vector<Word> values[kLanes<Word>];
  for (std::size_t i = 0; i < kLanes<Word>; ++i) {
    values[i] = load<Word>(kPack ? rows[i] + offset : cells + i * stride);
  }
  transpose<Word>(values);
  for (std::size_t i = 0; i < kLanes<Word>; ++i) {
    if constexpr (kPack) {
      store<Word>(cells + i * stride, values[i]);
    } else {
      store<Word>(rows[i] + offset, values[i]);
    }
  }
}

template <typename Word, bool kPack>
void columns(Pointer<kPack> cells, std::uint64_t stride, Rows<kPack> rows, std::size_t row_words) {
  constexpr std::size_t kN = kLanes<Word>;
  constexpr std::size_t kLine = kLineBytes / sizeof(Word);
  constexpr std::size_t kSteps = kLine / kN;
  const std::size_t whole_rows = rows.size() - rows.size() % kN;
  const std::size_t whole_words = row_words - row_words % kN;
  // A line of either side is worked off while it is in the first-level cache, whose sets far strides share. The next
  // lines of cells are asked for meanwhile, some with every square: the processor does not look that far ahead by
  // itself.
  for (std::size_t line = 0; line < whole_words; line += kLine) {
    const std::size_t end = std::min(line + kLine, whole_words);
    for (std::size_t t = 0; t < whole_rows; t += kN) {
      const std::size_t ahead = kLine + t / kN % kSteps * (kN / kSteps);
      for (std::size_t w = line; w < end; w += kN) {
        for (std::size_t i = 0; i < kN / kSteps; ++i) {
          __builtin_prefetch(cells + (w + ahead + i) * stride + t * sizeof(Word), kPack ? 1 : 0);
        }
        square<Word, kPack>(cells + w * stride + t * sizeof(Word), stride, rows.subspan(t, kN), w * sizeof(Word));
      }
    }
  }
  words<Word, kPack>(cells, stride, rows.first(whole_rows), whole_words, row_words);
  words<Word, kPack>(cells + whole_rows * sizeof(Word), stride, rows.subspan(whole_rows), 0, row_words);
}

// Sixteen elements of two rows, in turns.
template <typename Element, bool kPack>
void interleave(Pointer<kPack> cells, Pointer<!kPack> even, Pointer<!kPack> odd) {
  constexpr std::size_t kVectors = sizeof(Element);
  for (std::size_t i = 0; i < kVectors; ++i) {
    const auto cell = cells + 2 * i * kVectorBytes;
    const std::size_t at = i * kVectorBytes;
    if constexpr (kPack) {
      const Vector<Element> a = load<Element>(even + at), b = load<Element>(odd + at);
      store<Element>(cell, zip<Element, 0>(a, b));
      store<Element>(cell + kVectorBytes, zip<Element, 1>(a, b));
    } else {
      const Vector<Element> a = load<Element>(cell), b = load<Element>(cell + kVectorBytes);
      store<Element>(even + at, unzip<Element, 0>(a, b));
      store<Element>(odd + at, unzip<Element, 1>(a, b));
    }
  }
}

template <typename Element, bool kPack>
void pairs(const Grid& grid, std::size_t dim, Pointer<kPack> cells, std::uint32_t first, Rows<kPack> rows) {
  const std::size_t group = grid.dim.tile;
  for (std::size_t t = 0; t < rows.size();) {
    const auto token = static_cast<std::uint32_t>(first + t);
    const bool both = token % 2 == 0 && t + 1 < rows.size();
    auto cell = cells + grid.token.at(token);
    for (std::size_t d = 0; d < dim; d += group, cell += grid.dim.outer) {
      if (both) {
        interleave<Element, kPack>(cell, rows[t] + d * sizeof(Element), rows[t + 1] + d * sizeof(Element));
      } else {
        for (std::size_t i = 0; i < group; ++i) {
          move<kPack>(cell + i * grid.dim.inner, rows[t] + (d + i) * sizeof(Element), sizeof(Element));
        }
      }
    }
    t += both ? 2 : 1;
  }
}

template <bool kPack>
void run(const Block& block, const Grid& grid, Pointer<kPack> cells, std::uint32_t first, Rows<kPack> rows) {
  if (grid.cells == Cells::pairs) {
    block.element_bytes == 2 ? pairs<std::uint16_t, kPack>(grid, block.dim, cells, first, rows)
                             : pairs<std::uint8_t, kPack>(grid, block.dim, cells, first, rows);
    return;
  }
  const std::size_t word_bytes = std::size_t{grid.dim.tile} * block.element_bytes;
  const std::size_t row_words = block.row_bytes() / word_bytes;
  while (!rows.empty()) {
    const std::size_t run = std::min<std::size_t>(rows.size(), grid.token.tile - first % grid.token.tile);
    const auto at = cells + grid.token.at(first);
    if (word_bytes == 4) {
      columns<std::uint32_t, kPack>(at, grid.dim.outer, rows.first(run), row_words);
    } else if (word_bytes == 2) {
      columns<std::uint16_t, kPack>(at, grid.dim.outer, rows.first(run), row_words);
    } else {
      columns<std::uint8_t, kPack>(at, grid.dim.outer, rows.first(run), row_words);
    }
    first += static_cast<std::uint32_t>(run);
    rows = rows.subspan(run);
  }
}

}  // namespace

void pack(const Block& block, const Grid& grid, std::uint8_t* cells, std::uint32_t first,
          std::span<const std::uint8_t* const> rows) {
  run<true>(block, grid, cells, first, rows);
}

void unpack(const Block& block, const Grid& grid, const std::uint8_t* cells, std::uint32_t first,
            std::span<std::uint8_t* const> rows) {
  run<false>(block, grid, cells, first, rows);
}

}  // namespace baton::layout

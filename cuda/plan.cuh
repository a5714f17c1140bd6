// Which of all layouts (layout.cuh) a shape takes: warps, tiles of a turn and query rows of a block that fit its registers and shared memory.
#pragma once

#include "layout.cuh"

namespace signpost {

// Warps, units, phases and turns that fit: as many warps as registers allow, then as many tiles a turn as memory holds.
template <typename Shape, int W, int U, int P, int N, int S>
struct Sized : Shape {
    static constexpr bool BYTES = N == 0;  // then there is no ring
    static constexpr int PARTS = Limits<Shape>::PARTS, WARPS = W, UNIT = U, PHASES = P, STACK = S, TURNS = N;
};

// S: tiles of a turn that share columns.
template <int W, int U, int P, int N, int S = 1>
struct Choice {
    template <typename Shape>
    struct For {
        using Config = Sized<Shape, W, U, P, N, S>;
    };
    template <typename Shape>
    static constexpr bool fits() {
        using L = Limits<Shape>;
        if constexpr (Shape::ALONE && !L::ALONE) return false;
        else if constexpr (W > 0 && N == 0) {
            if constexpr (!Bytes<Shape>::POSSIBLE || W > L::BYTE_WARPS) return false;
            else return Layout<Sized<Shape, W, U, P, N, S>>::fits(L::SHARED);
        } else if constexpr (W > L::WARPS || P > L::MOST || W % (L::PARTS * ((U < L::PAGE ? U : L::PAGE) / TILE)) != 0) return false;
        else if constexpr (!L::template suits<W, U, P * S, P * N>()) return false;
        else return Layout<Sized<Shape, W, U, P, N, S>>::fits(L::SHARED);
    }
};

// The first choice that fits.
template <bool FITS, typename Shape, typename First, typename... Others>
struct Pick : First::template For<Shape> {};
template <typename Shape, typename First, typename Next, typename... Others>
struct Pick<false, Shape, First, Next, Others...> : Pick<Next::template fits<Shape>(), Shape, Next, Others...> {};

// Whether one does. Choices behind it are not looked at: what is far too small for a shape is not sound.
template <bool FITS, typename Shape, typename... Others>
struct AnyFits {
    static constexpr bool VALUE = FITS;
};
template <typename Shape, typename Next, typename... Others>
struct AnyFits<false, Shape, Next, Others...> : AnyFits<Next::template fits<Shape>(), Shape, Others...> {};

template <typename... Choices>
struct List {
    template <typename Shape>
    static constexpr bool FITS = AnyFits<false, Shape, Choices...>::VALUE;
    template <typename Shape>
    using Config = typename Pick<false, Shape, Choice<0, 0, 0, 0>, Choices...>::Config;
};

// Four slots a warp hide the memory's latency.
using AllChoices = List<
    Choice<12, 64, 1, 0>, Choice<8, 64, 1, 0>, Choice<7, 64, 1, 0>, Choice<6, 64, 1, 0>, Choice<5, 64, 1, 0>, Choice<4, 64, 1, 0>, Choice<3, 64, 1, 0>,  // by bytes
    Choice<16, 64, 4, 1>, Choice<16, 64, 2, 2>, Choice<16, 64, 1, 4>, Choice<12, 64, 4, 1>, Choice<12, 64, 2, 2>, Choice<12, 64, 1, 4, 2>, Choice<12, 64, 1, 4>, Choice<12, 64, 1, 3>,
    Choice<8, 64, 4, 2>, Choice<8, 64, 4, 1>, Choice<8, 64, 2, 2>, Choice<8, 64, 2, 1>, Choice<8, 64, 1, 4, 2>, Choice<8, 64, 1, 4>, Choice<8, 64, 1, 3>,
    Choice<8, 32, 4, 1>, Choice<8, 32, 2, 2>, Choice<8, 32, 1, 4, 2>, Choice<8, 32, 1, 4>, Choice<8, 32, 1, 3>,
    Choice<6, 32, 4, 1>, Choice<6, 32, 2, 2>, Choice<6, 32, 1, 4, 2>, Choice<4, 64, 4, 2>, Choice<4, 64, 4, 1>, Choice<4, 64, 2, 2>, Choice<4, 64, 2, 1>, Choice<4, 64, 1, 4, 2>, Choice<4, 64, 1, 2, 2>, Choice<6, 32, 1, 4>, Choice<4, 64, 1, 4>, Choice<4, 64, 1, 3>,
    Choice<4, 16, 4, 1>, Choice<4, 16, 2, 2>, Choice<4, 16, 1, 4, 2>, Choice<4, 16, 1, 4>, Choice<4, 16, 1, 3>, Choice<4, 16, 1, 2>, Choice<4, 16, 1, 1>>;
// Warps alone, whose pages go by bytes or by tiles.
using AloneChoices = List<Choice<12, 64, 1, 0>, Choice<11, 64, 1, 0>, Choice<10, 64, 1, 0>, Choice<9, 64, 1, 0>, Choice<8, 64, 1, 0>, Choice<7, 64, 1, 0>,
                          Choice<6, 64, 1, 0>, Choice<5, 64, 1, 0>, Choice<4, 64, 1, 0>,
                          Choice<16, 16, 4, 1>, Choice<16, 16, 2, 2>, Choice<12, 16, 4, 1>, Choice<12, 16, 2, 2>, Choice<10, 16, 4, 1>, Choice<12, 16, 2, 1>,
                          Choice<8, 16, 4, 1>, Choice<8, 16, 2, 2>, Choice<8, 16, 2, 1>, Choice<7, 16, 4, 1>, Choice<7, 16, 2, 1>, Choice<6, 16, 4, 1>, Choice<6, 16, 2, 1>,
                          Choice<5, 16, 4, 1>, Choice<5, 16, 2, 1>, Choice<12, 16, 1, 4>, Choice<8, 16, 1, 4>, Choice<8, 16, 1, 2>, Choice<7, 16, 1, 2>, Choice<6, 16, 1, 2>,
                          Choice<5, 16, 1, 2>, Choice<4, 16, 4, 1>, Choice<4, 16, 2, 1>, Choice<4, 16, 1, 2>>;
// For what fits none of them with any number of rows.
using SmallChoices = List<Choice<2, 16, 1, 2>, Choice<2, 16, 1, 1>>;

template <typename Shape, int R, int B, bool A = false>
struct Fitted : Shape {
    static constexpr int ROWS = R, BLOCKS = B;
    static constexpr bool ALONE = A;
};

// Which of them, and the query rows of a block: as many as the shape asks for, or half of them, and so on, until a choice fits.
template <typename Shape, bool FITS = AllChoices::FITS<Fitted<Shape, 1, 1>>>
struct ChoicesOf : SmallChoices {};
template <typename Shape>
struct ChoicesOf<Shape, true> : AllChoices {};
template <typename Shape, int ROWS = Shape::ROWS>
constexpr int rows_that_fit() {
    if constexpr (ROWS == 1 || ChoicesOf<Shape>::template FITS<Fitted<Shape, ROWS, 1>>) return ROWS;
    else return rows_that_fit<Shape, (ROWS + 1) / 2>();
}

// Registers of a thread, where a multiprocessor has so many warps of them, dealt out among its four parts, each of which leaves some registers to others.
constexpr int registers_of(int warps, int left) {
    const int most = (16384 - left) / (32 * ((warps + 3) / 4)) / 8 * 8;
    return most < 255 ? most : 255;
}

// Warps are alone if the shape asks for it and that fits; else as many blocks share a multiprocessor as it asks for, if they fit with all rows, or one.
template <typename Shape, bool ALONE = Shape::ALONE && AloneChoices::FITS<Fitted<Shape, Shape::ROWS, 1, true>>>
struct Plan {
    static constexpr int BLOCKS = AllChoices::FITS<Fitted<Shape, Shape::ROWS, Shape::BLOCKS>> ? Shape::BLOCKS : 1;
    static constexpr int ROWS = BLOCKS > 1 ? Shape::ROWS : rows_that_fit<Shape>();
    using Shared = Fitted<Shape, ROWS, BLOCKS>;
    using Config = typename ChoicesOf<Shape>::template Config<Shared>;
    static constexpr int WARPS = Config::WARPS, PHASES = Config::PHASES, WORKERS = 1;  // of a block: what leaves results of its own
    static constexpr int THREADS = 32 * WARPS, SHARED = Layout<Config>::SHARED;
    static constexpr int REGISTERS = registers_of(WARPS * BLOCKS, Layout<Config>::BESIDE ? 32 * Layout<Config>::MERGE_REGISTERS : 0);
    static constexpr bool TURNS = Layout<Config>::ROPE && !Layout<Config>::BYTES;  // keys are turned by what runtime/turns.py makes
    static_assert(Layout<Config>::fits(Limits<Shared>::SHARED), "no choice fits");
    static_assert(WARPS * Layout<Config>::WARP_BYTES >= 2048, "codebooks go through the ring's place");
};
template <typename Shape>
struct Plan<Shape, true> {
    static constexpr int BLOCKS = 1, ROWS = Shape::ROWS;
    using Shared = Fitted<Shape, ROWS, 1, true>;
    using Config = typename AloneChoices::template Config<Shared>;
    static constexpr int WARPS = Config::WARPS, PHASES = Config::PHASES, WORKERS = WARPS;
    static constexpr int THREADS = 32 * WARPS, SHARED = Layout<Config>::SHARED, REGISTERS = registers_of(WARPS, 0);
    static constexpr bool TURNS = Layout<Config>::ROPE && !Layout<Config>::BYTES;  // keys are turned by what runtime/turns.py makes
    static_assert(WARPS * Layout<Config>::WARP_BYTES >= 2048, "codebooks go through the ring's place");
};

}  // namespace signpost

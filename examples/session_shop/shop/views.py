import uuid

from django.shortcuts import get_object_or_404, redirect, render
from django.views import View

from shop.models import Order


def basket_of(request):
    return request.session.get("basket") or {"id": str(uuid.uuid4()), "items": []}


def basket(request):
    basket = basket_of(request)
    if request.method == "POST":
        basket["items"].append(request.POST["item"])
        request.session["basket"] = basket
    return render(request, "basket.html", {"basket": basket})


class Checkout(View):
    def dispatch(self, request):
        if not basket_of(request)["items"]:
            return redirect("basket")
        return super().dispatch(request)

    def get(self, request):
        return render(request, "checkout.html")

    def post(self, request):
        if request.POST.get("action") == "place_order":
            return self.place_order(request)
        request.session["email"] = request.POST["email"]
        return render(request, "preview.html", {"basket": basket_of(request)})

    def place_order(self, request):
        order = Order.objects.create(
            email=request.session["email"], items=basket_of(request)["items"]
        )
        del request.session["basket"]
        request.session["order"] = str(order.pk)
        return redirect("thanks")


def thanks(request):
    order = get_object_or_404(Order, pk=request.session.get("order"))
    return render(request, "thanks.html", {"order": order})
